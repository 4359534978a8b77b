"""The examples for containers and clouds: their syntax, and the commands in them."""

import json
import re
import shlex
from pathlib import Path

import yaml

from memtrain.cli.app import COMMANDS
from memtrain.recipes.reading.shipped import shipped_names

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = {command.name for command in COMMANDS}


def test_the_kubernetes_job_runs_a_shipped_recipe_on_a_volume():
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure"
    (container,) = pod["containers"]
    command, recipe, option, folder = container["args"]
    assert command in NAMES
    assert recipe in shipped_names()
    assert option == "--run-dir"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert folder.startswith(mounts["runs"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_skypilot_task_has_the_keys_of_one_and_keeps_its_run_in_the_bucket():
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    assert set(task) == {"name", "resources", "envs", "file_mounts", "setup", "run"}
    assert task["envs"]["RECIPE"] in shipped_names()
    commands = [shlex.split(line) for line in task["run"].splitlines()]
    assert [words[0] for words in commands] == ["memtrain", "memtrain"]
    assert {words[1] for words in commands} <= NAMES
    assert commands[1][-1].startswith(tuple(task["file_mounts"]))


def test_the_container_file_has_known_instructions_and_extras():
    text = (EXAMPLES / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    words = {line.split()[0] for line in lines}
    assert words == {"FROM", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert json.loads(lines[-2].removeprefix("ENTRYPOINT ")) == ["memtrain"]
    project = (EXAMPLES.parent / "pyproject.toml").read_text()
    # Triton compiles its launchers against Python's headers.
    assert {"python3-dev", "build-essential"} <= set(text.split())
    ignored = (EXAMPLES.parent / ".dockerignore").read_text().split()
    assert {".git", ".venv*", ".whl", "wheels"} <= set(ignored)
    extras = re.search(r"/src\[([\w,]+)\]", text)
    assert extras is not None
    assert all(f"\n{extra} = [" in project for extra in extras[1].split(","))
    # mlflow 3.17 takes no pyarrow from 26 on: beside these versions pip finds nothing, and no image is built.
    pinned = (EXAMPLES.parent / "constraints.txt").read_text()
    assert int(re.search(r"^pyarrow==(\d+)", pinned, re.MULTILINE)[1]) >= 26  # pyright: ignore
    assert "trackers" not in extras[1]
