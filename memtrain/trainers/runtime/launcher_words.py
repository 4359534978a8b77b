"""Words of the environment by which torch and accelerate know a rank: of no use to a run of one process."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from memtrain.errors import OR, LaunchError

NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("NODE_RANK", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *(
            "PMI_SIZE",
            "PMI_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
        ),
        *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    }
)
BEGINNINGS = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""Of names by which accelerate's launcher hands its configuration on."""

LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Set by torchrun and by accelerate's launcher alone."""


def drop_launcher_words(environment: MutableMapping[str, str]) -> list[str]:
    """Take the words of an earlier launch, or of another one, out of the environment; their names.

    With them a single process would wait for ranks that nobody starts, on another device.
    """
    left = sorted(name for name in environment if name in NAMES or name.startswith(BEGINNINGS))
    for name in left:
        del environment[name]
    return left


def refuse_launcher(environment: Mapping[str, str]) -> None:
    """Raise LaunchError in one of several processes that torchrun has started for a plan of one."""
    count = environment.get("WORLD_SIZE", "1")
    if LAUNCHED in environment and count != "1":
        raise LaunchError(
            f"this is process {environment.get('RANK', '?')} of {count} that torchrun or accelerate started, "
            "and the plan has one process",
            "WORLD_SIZE of the environment",
            "run the same command without torchrun: memtrain starts the processes of a run itself "
            f"(cluster.processes){OR}unset {LAUNCHED} where nothing started it",
        )
