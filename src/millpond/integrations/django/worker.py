"""The module that `manage.py millpond run` runs: it sets Django up and imports the handlers of all apps."""

import django

django.setup()

from millpond.integrations.django.handler_modules import import_handlers  # noqa: E402 - after the set-up
from millpond.integrations.django.project import the_pond  # noqa: E402

pond = the_pond()
import_handlers()
