"""Keeping freed memory."""

import ctypes

import pytest

from ctr_ps.protos.runtime.malloc import keep_freed_memory


def test_setting_is_accepted_where_there_is_mallopt():
    assert keep_freed_memory() is hasattr(ctypes.CDLL(None), "mallopt")


def test_allocator_without_the_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())

    assert keep_freed_memory() is False
