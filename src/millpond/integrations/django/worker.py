"""The module that `manage.py millpond run` runs: it sets Django up and imports the handlers of all apps."""

from millpond.integrations.django import import_path

import_path.take_over()

import django  # noqa: E402 - from the path of manage.py

django.setup()

from millpond.integrations.django.handler_modules import import_handlers  # noqa: E402 - after the set-up
from millpond.integrations.django.project import the_pond  # noqa: E402

pond = the_pond()
import_handlers()
