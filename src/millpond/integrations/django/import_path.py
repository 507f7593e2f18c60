"""The path on which `manage.py` finds the modules of a project, for the worker processes that it starts.

They are started by `python -m millpond`, without the folder of manage.py and the folders that manage.py adds.
"""

from __future__ import annotations

import os
import sys

PATH = "MILLPOND_DJANGO_PATH"
"""Variable of the environment with the folders."""


def take_over() -> None:
    """Import from the folders of the process that started this one."""
    if given := os.environ.get(PATH):
        sys.path[:] = given.split(os.pathsep)
