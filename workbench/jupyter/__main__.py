"""`python -m workbench.jupyter [--prefix FOLDER]`: see the package's docstring."""

import argparse
import sys

from workbench.errors import WorkbenchError
from workbench.jupyter import install

parser = argparse.ArgumentParser(prog="python -m workbench.jupyter", description=__doc__)
parser.add_argument("--prefix", default=sys.prefix, help="environment to install into (default: the running Python's)")
arguments = parser.parse_args()
try:
    for path in install(arguments.prefix):
        print(f"installed {path}")
except WorkbenchError as error:
    sys.exit(f"workbench: error: {error}")
