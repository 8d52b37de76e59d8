"""mkpack: one artifact per mixture-of-experts model, decoded as fast as memory allows.

with mkpack.load("model.mkpack") as model:
    for piece in model.generate("Hello"):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkpack.loader import load
    from mkpack.model import Model

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    # `import mkpack` stays free of ctypes and everything under it: the command line imports it for every --help.
    if name in ("Model", "load"):
        from mkpack import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
