"""Operators whose interface may still change."""

from ..._entry import hyper_mega_moe

__all__ = ["HyperMegaMoEDFunction", "hyper_mega_moe"]


def __getattr__(name):
    if name == "HyperMegaMoEDFunction":  # imports torch
        from ..._torch import HyperMegaMoEDFunction
        return HyperMegaMoEDFunction
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
