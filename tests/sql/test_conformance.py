"""The suite of all transports, over a client that calls SQL functions only: what concerns its verbs."""

import pytest

from tests.conformance.test_claim import *  # noqa: F403
from tests.conformance.test_dedupe import *  # noqa: F403
from tests.conformance.test_extend import *  # noqa: F403
from tests.conformance.test_order import *  # noqa: F403
from tests.conformance.test_publish import *  # noqa: F403
from tests.conformance.test_schedule import *  # noqa: F403
from tests.conformance.test_settle import *  # noqa: F403

pytestmark = pytest.mark.slow

# SQL remembers ids for seven days, and a client of SQL knows no handler that did not run.
del test_the_window_ends, test_rejects_keep_each_its_own_reason_and_error  # type: ignore[name-defined]  # noqa: F821
