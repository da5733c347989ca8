"""Where the kits find the labs without knowing one: `workbench` registers them, the kits ask for `labs()`."""

from __future__ import annotations

from types import ModuleType

_registered: list[ModuleType] = []


def register(labs: ModuleType) -> None:
    """Called once, by the package itself."""
    _registered[:] = [labs]


def labs() -> ModuleType:
    """`workbench.labs`: experiments, panels and exercise sets by name."""
    assert _registered, "workbench registers its labs when it is imported"
    return _registered[0]
