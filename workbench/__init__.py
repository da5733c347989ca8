"""A compact, real inference engine with instruments, for learning how LLM inference works by building it.

>>> import workbench as wb
>>> model = wb.load("stdlib-10m")  # doctest: +SKIP
>>> wb.generate(model, "def read_lines(path):", max_new_tokens=64, temperature=0.8, seed=0).text  # doctest: +SKIP

Names arrive when they are first used: `import workbench` loads neither torch nor Jupyter.
"""

from __future__ import annotations

import importlib
import os
import sys

from workbench import labs, registry

# Triton decides when it is imported, by whomever, whether its kernels are compiled or interpreted. This is a first
# answer, without torch; `kernels/launch.py` has the last word, unless somebody set TRITON_INTERPRET.
if (
    not os.environ.get("TRITON_INTERPRET")
    and "triton" not in sys.modules
    and not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg"))
):
    os.environ["TRITON_INTERPRET"] = os.environ["WORKBENCH_INTERPRET"] = "1"  # the second says that we set the first

registry.register(labs)

_HOMES = {  # name -> (module, name there), or (module, None) for the module itself
    "load": ("workbench.models", "load"),
    "prepare": ("workbench.quantization.prepared", "prepare"),  # of workbench.models, and weights=
    "generate": ("workbench.generation", "generate"),
    "stream": ("workbench.generation", "stream"),
    "beam": ("workbench.decoding", "generate_beam"),
    "make_kv": ("workbench.kv", "make_kv"),
    "Engine": ("workbench.serving", "Engine"),
    "Request": ("workbench.serving", "Request"),
    "SchedulerSettings": ("workbench.serving", "SchedulerSettings"),
    "TierSettings": ("workbench.serving", "TierSettings"),
    "experiments": ("workbench.experiments", None),
    "panels": ("workbench.panels", None),
    "lectures": ("workbench.lectures", None),
    "checks": ("workbench.checks", None),
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("inference-workbench")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    module, attribute = _HOMES[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
