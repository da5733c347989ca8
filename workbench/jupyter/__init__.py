"""What JupyterLab needs to open the course without asking anything: one kernel and five settings.

`python -m workbench.jupyter` installs both into the Python environment that runs it; `make setup` calls it. On a
machine where the course lives in an environment of its own beside a shared JupyterLab, give that JupyterLab's
environment: `--prefix FOLDER`.

The settings (overrides.json) are defaults; what a user chose in JupyterLab's settings still wins.

- `fetchNews`, `checkForUpdates`: no question about news on the first start, no request to the network.
- `autoStartDefaultKernel`: a notebook whose kernel is not on this machine opens on the default one, not on a dialog.
- `defaultViewers`: a Markdown file opens as the page that it is (`progress.md`, the glossary); *Open With* has the
  editor.
- `windowingMode: defer`: every cell stays in the page, so that long lectures keep their pictures and panels while
  scrolling.

`commsOverSubshells` is left alone on purpose: with it JupyterLab sends a panel's messages to a thread of the kernel's,
so that Stop works while a cell runs. ipykernel before 7.0 has no such threads, and from 7.4 on it uses them for a
widget that a cell made only when asked to (`let_the_page_choose`, workbench/panels/controls.py): without them a click
waits for the cell. The panels work on threads of their own and are right both ways.
"""

import sys
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import write_bytes

KERNEL_NAME = "workbench"
DISPLAY_NAME = "Inference Workbench (Python)"
OVERRIDES = Path(__file__).parent / "overrides.json"


def installed_paths(prefix: str | Path = sys.prefix) -> tuple[Path, Path]:
    """Where `install` puts the kernel's folder and the settings file under an environment's `prefix`."""
    share = Path(prefix) / "share" / "jupyter"
    return share / "kernels" / KERNEL_NAME, share / "lab" / "settings" / "overrides.d" / "workbench.json"


def install(prefix: str | Path = sys.prefix) -> tuple[Path, Path]:
    """Register the running Python as the kernel `workbench` and install the settings, replacing former ones.

    Returns the two paths written. Raises WorkbenchError when `prefix` cannot be written to.
    """
    from ipykernel.kernelspec import install as install_kernel

    kernel, settings = installed_paths(prefix)
    try:
        install_kernel(prefix=str(prefix), kernel_name=KERNEL_NAME, display_name=DISPLAY_NAME)
        write_bytes(settings, OVERRIDES.read_bytes())
    except (OSError, WorkbenchError) as error:
        raise WorkbenchError(
            f"cannot install the kernel and the JupyterLab settings under {prefix}: {error}. "
            "Use an environment of your own (make setup makes one), or --prefix with a folder you may write to."
        ) from error
    return kernel, settings
