"""The nodes that a job will get, as the plan must know them before the job is submitted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memtrain.cli.launch.slurm_queue import ask, has_slurm
from memtrain.errors import Fault, RecipeError
from memtrain.memory.hardware.devices import Hardware, card_name, cpu, detect, known_names
from memtrain.memory.plan.units import MIB
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.sections.slurm import Slurm


@dataclass(frozen=True, slots=True)
class Node:
    """A node, as SLURM describes it."""

    partitions: tuple[str, ...]
    memory_bytes: int
    gpu: str
    """The GPU's kind in the cluster's own word; empty where there is none, or it is not given."""


def hardware_of(loaded: LoadedRecipe, nodes: Sequence[Node]) -> Hardware:
    """The hardware of the job that a recipe asks for, where `nodes` are its possible nodes.

    Raises: RecipeError when the kind of GPU is not known, or the processes do not fill the nodes.
    """
    cluster = loaded.recipe.cluster
    asked = cluster.slurm or Slurm()
    if cluster.device == "cpu":
        if asked.gpus_per_node is not None:
            raise RecipeError(
                f"cluster.slurm.gpus_per_node is {asked.gpus_per_node}, but cluster.device is cpu",
                loaded.where("cluster.slurm.gpus_per_node"),
                "remove one of the two",
            )
        per_node = _per_node(loaded, asked.nodes, 1)
        host = asked.mem or min((node.memory_bytes for node in nodes), default=detect("cpu").memory_bytes)
        found = cpu(host, per_node * _cores_per_process(loaded, asked))
    else:
        per_node = _per_node(loaded, asked.nodes, asked.gpus_per_node or 1)
        found = Hardware.named(asked.gpu or _known_gpu(loaded, nodes), per_node)
        if asked.cpus_per_task != "auto":
            found = replace(found, num_cores=per_node * asked.cpus_per_task)
        if asked.mem is not None:
            found = replace(found, host_bytes=asked.mem)
    return replace(found, num_nodes=asked.nodes)


def _per_node(loaded: LoadedRecipe, num_nodes: int, usual: int) -> int:
    """Processes of a node."""
    processes = loaded.recipe.cluster.processes
    if processes == "auto":
        return usual
    is_cuda = loaded.recipe.cluster.device != "cpu"
    if processes % num_nodes or (is_cuda and processes != num_nodes * usual):
        devices = f" with {usual} GPUs" if is_cuda else ""
        raise RecipeError(
            f"cluster.processes is {processes}, and the job has {num_nodes} nodes{devices}",
            loaded.where("cluster.processes"),
            "remove it: cluster.slurm gives their number"
            if is_cuda
            else f"set it to a multiple of {num_nodes}",
        )
    return processes // num_nodes


def _cores_per_process(loaded: LoadedRecipe, asked: Slurm) -> int:
    threads = loaded.recipe.cluster.threads
    if asked.cpus_per_task != "auto":
        return asked.cpus_per_task
    return 1 if threads == "auto" else threads


def _known_gpu(loaded: LoadedRecipe, nodes: Sequence[Node]) -> str:
    """The smallest kind of GPU among the nodes."""
    gpus = {node.gpu for node in nodes if node.gpu}
    known = {card_name(gpu) for gpu in gpus}
    if not gpus or None in known:
        words = f" (its nodes say: {', '.join(sorted(gpus))})" if gpus else ""
        asked = loaded.recipe.cluster.slurm
        where = f"partition {asked.partition}" if asked and asked.partition else "the partition"
        raise RecipeError(
            [
                Fault(
                    f"the memory of a GPU of {where} is unknown{words}",
                    loaded.where("cluster.slurm"),
                    f"name the GPU: --gpu NAME, or cluster.slurm.gpu, as one of {', '.join(known_names())}",
                )
            ]
        )
    return min((name for name in known if name), key=lambda name: Hardware.named(name).memory_bytes)


def nodes_of(partition: str | None) -> list[Node]:
    """The nodes of a partition, or of the default one; empty where SLURM is not on this machine."""
    if not has_slurm():
        return []
    if partition is None:
        listed = ask("scontrol", "show", "partition", "--oneliner").stdout
        named = re.search(r"PartitionName=(\S+).*\bDefault=YES", listed)
        partition = named[1] if named else None
    found = parse_nodes(ask("scontrol", "show", "node", "--oneliner").stdout)
    return [node for node in found if partition in node.partitions]


def parse_nodes(text: str) -> list[Node]:
    """The nodes in the lines of `scontrol show node --oneliner`."""
    nodes: list[Node] = []
    for line in text.splitlines():
        words = dict(re.findall(r"(\w+)=(\S*)", line))
        if "NodeName" not in words:
            continue
        # Gres=gpu:h100:8(S:0-1), or gpu:8 where the cluster does not say the kind.
        kind = re.search(r"\bgpu:([A-Za-z][^:(,]*):", words.get("Gres", ""))
        partitions = tuple(words.get("Partitions", "").split(","))
        memory = int(words.get("RealMemory", "0")) * MIB
        nodes.append(Node(partitions, memory, kind[1] if kind else ""))
    return nodes
