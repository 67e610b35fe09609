"""Who may reach the service."""

import pytest

from gramwatch import InputError
from gramwatch.deploy.serve import check_reach
from gramwatch.deploy.serve.server import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    assert is_loopback(host)
    check_reach(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_other_addresses_need_a_token_or_a_word(host):
    assert not is_loopback(host)
    with pytest.raises(InputError, match="there is no token: set GRAMWATCH_TOKEN"):
        check_reach(host, None)
    check_reach(host, "sixteen letters!")
    check_reach(host, None, anyone=True)


def test_a_short_token_is_refused():
    with pytest.raises(InputError, match="has 5 letters: it needs at least 16"):
        check_reach("127.0.0.1", "short")
