"""The scripted engine of slime.testing, under the name by which the tests know it."""

from slime.testing.fake_engine import FakeEngine as FakeEngine
from slime.testing.fake_engine import Fault as Fault
from slime.testing.fake_engine import Prompt as Prompt
from slime.testing.fake_engine import log_prob_of as log_prob_of
from slime.testing.fake_engine import make_reply as make_reply
