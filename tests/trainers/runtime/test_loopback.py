"""Ranks of one machine listen on its loopback interface and nowhere else."""

import importlib
import os
from datetime import timedelta

import psutil
import pytest

from memtrain.trainers.runtime import loopback
from memtrain.trainers.runtime.loopback import MEETINGS, interface, listen_on_loopback, loopback_store


def listening() -> set[str]:
    return {one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"}


def test_a_store_listens_on_loopback_and_is_reached_there():
    before = listening()
    store = loopback_store("localhost", 0, 2, True, timedelta(seconds=10), False, True)
    assert listening() - before <= {"127.0.0.1"}
    assert "127.0.0.1" in listening()
    other = loopback_store("127.0.0.1", store.port, 2, False, timedelta(seconds=10), False, True)
    other.set("said", "yes")
    assert store.get("said") == b"yes"


def test_every_store_at_which_torch_lets_ranks_meet_is_one(monkeypatch: pytest.MonkeyPatch):
    for name in MEETINGS:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "TCPStore", module.TCPStore)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "none")
    listen_on_loopback()
    assert all(importlib.import_module(name).TCPStore is loopback_store for name in MEETINGS)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == interface()
    assert any(one.address == loopback.LOOPBACK for one in psutil.net_if_addrs()[interface()])
