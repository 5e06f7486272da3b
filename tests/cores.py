"""A mark for tests that look at what several cores do: plans and code of one core have no parallel loops."""

import pytest

from pbkern.targets.cpu.machines.detect import usable_cores

of_several_cores = pytest.mark.skipif(usable_cores()[0] < 2, reason="one core is usable")
