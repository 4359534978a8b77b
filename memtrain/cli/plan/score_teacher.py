"""From a recipe to a pass of its teacher alone: data prepared, tokenizers compared, settings decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memtrain.cli.plan.model_config import model_config
from memtrain.cli.plan.recipe_lines import at_their_lines
from memtrain.errors import RecipeError
from memtrain.memory.estimate.workload import DTYPE_BYTES
from memtrain.memory.hardware.devices import detect
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.plan import PreparedData
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.memory.rules.score_settings import scoring_settings
from memtrain.recipes.edit import with_key
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.store.prepare import prepare
from memtrain.trainers.data.tokenize.teacher_vocabulary import refuse_other_teacher, teacher_model

WEIGHTS_SHARE = 0.7
"""Share of a GPU's free memory above which a teacher's layers come from the host one by one. Taste."""


@dataclass(frozen=True, slots=True)
class TeacherPass:
    """A pass that is ready to be made."""

    recipe: Recipe
    data: PreparedData
    settings: Settings
    """Of the teacher, which is alone in memory."""
    num_columns: int
    """The student's vocabulary."""


def prepared_pass(loaded: LoadedRecipe, *, progress: Callable[[int, int], None] | None = None) -> TeacherPass:
    """The pass of a recipe's teacher over its data.

    Raises: RecipeError, DataError, LaunchError.
    """
    recipe = loaded.recipe
    section = recipe.taught
    if section is None:
        raise RecipeError(
            f"score-teacher writes a teacher's top-k tokens, but {recipe.method} has no teacher",
            loaded.where("method"),
            "use a recipe with method: distill",
        )
    if section.top_k is None or section.teacher is None or section.teacher == "adapter_off":
        missing = "top_k" if section.top_k is None else "teacher"
        raise RecipeError(
            f"score-teacher needs {recipe.method}.teacher (a model), top_k and top_k_file",
            loaded.where(f"{recipe.method}.{missing}"),
            f"add `{recipe.method}.teacher=MODEL {recipe.method}.top_k=64 {recipe.method}.top_k_file=FOLDER`",
        )
    with at_their_lines(loaded):
        refuse_other_teacher(recipe, f"{recipe.method}.teacher")
        data = prepare(recipe, progress=progress)
        # Behind a server the teacher's own shape is not asked for: rows are laid out as the student's.
        is_served = section.teacher_server is not None
        config = model_config(recipe.model if is_served else teacher_model(recipe))
    hardware = detect(recipe.cluster.device)
    dtype = recipe.model.dtype if section.teacher_dtype == "auto" else section.teacher_dtype
    asked = SourcedRecipe(with_key(recipe, "model.dtype", dtype), loaded.where)
    settings = scoring_settings(asked, hardware, config)
    weights = DTYPE_BYTES[settings.dtype] * shape_of(config).num_parameters
    waits = hardware.device == "cuda" and weights > WEIGHTS_SHARE * hardware.free_bytes
    settings = settings.model_copy(update={"weights_offload": waits})
    student = shape_of(model_config(recipe.model))
    return TeacherPass(recipe, data, settings, student.vocab_size)
