"""The `generate.vllm:` section: devices, memory, and the answer to failures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import Bytes, Section, address_of_server, changes, one_or_many

OF_PROCESS = (
    "python",
    "devices",
    "memory_share",
    "sleep",
    "eager",
    "bucket",
)
"""Keys of a process of the run's own; a server was started by somebody else."""


def numbers_of(value: object) -> object:
    """A device, or a list of them, as a tuple."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else one_or_many(value)


class Vllm(Section):
    """vLLM as the sampler: a process that this run starts, or a running server."""

    python: str | None = None
    """Interpreter of an environment with vLLM, such as `~/envs/vllm/bin/python`. Its packages need not be
    the trainer's. If not set: the one that memtrain runs in."""

    server: str | None = None
    """Address of a vLLM server (`http://localhost:8000`) instead of a process of the run. It must be
    started with VLLM_SERVER_DEV_MODE=1; otherwise it cannot receive new weights."""

    shared_dir: str | None = None
    """`server`: folder that it sees under the same path; each rollout's weights are written there, as a
    checkpoint. If not set: in the run folder."""

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(numbers_of)] = ()
    """CUDA devices for vLLM alone, one for each process of the run. If not set: it shares the device of
    its process, and sleeps while that trains."""

    memory_share: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of the device that vLLM may use while it generates (its gpu_memory_utilization). Higher: more
    completions at a time. `auto`: what training leaves of the budget, and no more than a rollout needs."""

    sleep: Literal["auto", "off", "level1", "level2"] = "auto"
    """Memory that vLLM gives back while the policy trains: level1 moves its weights to the host, level2 drops
    them (they come again in any case). `auto`: level2 on a CUDA device that it shares, else off."""

    eager: bool = True
    """Without CUDA graphs: less memory, a quicker start, slower tokens."""

    bucket: Bytes = 256 * 2**20
    """Bytes of weights that are sent at a time. Higher: more memory for a moment, hardly faster."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds without a sign of life after which vLLM counts as hung; a server's answer must be whole by
    then."""

    start_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that its start may take, or that a server may take to appear."""

    restarts: Annotated[int, Field(ge=0)] = 2
    """Number of times that it is restarted (a server: asked again) in one rollout. Finished completions
    are kept; the others are generated again from the same seeds."""

    on_failure: Literal["abort", "native"] = "abort"
    """Reaction when the restarts are not enough: end the run, or continue with the trained module as the
    sampler."""

    @model_validator(mode="after")
    def _one_place(self) -> Vllm:
        if self.server is None:
            if self.shared_dir is not None:
                raise ValueError("shared_dir is for a server; set server, or remove it")
            return self
        address_of_server("server", self.server)
        for name in OF_PROCESS:
            if changes(self, name):
                raise ValueError(f"{name} is for a process of the run's own, and server is given; remove one")
        return self
