"""Ranks of one machine meet on its loopback interface: nobody else on the network can speak to them.

torch's store of a process group listens on every interface, whatever address it is given. Run as a program,
this is accelerate's launcher with a store that listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from importlib import import_module
from typing import Any

import psutil
from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
MEETINGS = ("torch.distributed.rendezvous", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
"""Modules of torch (2.13) that make the store at which ranks meet."""


def interface() -> str:
    """The name of the loopback interface: `lo` on Linux."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == LOOPBACK for one in addresses):
            return name
    return "lo"


def loopback_store(
    host_name: str,
    port: int = 0,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(minutes=5),
    wait_for_workers: bool = True,
    multi_tenant: bool = False,
    use_libuv: bool = True,
) -> TCPStore:
    """torch's TCPStore, of which the master listens on the loopback interface only."""
    if not is_master:
        return TCPStore(
            host_name, port, world_size, False, timeout, wait_for_workers, multi_tenant, use_libuv=use_libuv
        )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    listener.listen(2048)
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        world_size,
        True,
        timeout,
        wait_for_workers,
        multi_tenant,
        # The store owns the socket from here on.
        master_listen_fd=listener.detach(),
        use_libuv=use_libuv,
    )


def listen_on_loopback() -> None:
    """From now on ranks of this process and its children meet and talk on the loopback interface.

    Every store that torch makes for them to meet is a `loopback_store`; gloo and NCCL are told the interface.
    """
    for name in MEETINGS:
        module: Any = import_module(name)
        assert module.TCPStore in (TCPStore, loopback_store), f"{name} makes its stores another way"
        module.TCPStore = loopback_store
    os.environ.update(GLOO_SOCKET_IFNAME=interface(), NCCL_SOCKET_IFNAME=interface())


def main() -> None:
    """`accelerate launch`, for one machine."""
    from accelerate.commands.launch import main as launch

    listen_on_loopback()
    launch()


if __name__ == "__main__":
    main()
