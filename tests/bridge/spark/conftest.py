from __future__ import annotations

import pytest

from penstock.bridge.session import Session


@pytest.fixture
def session(spark_session: Session) -> Session:
    """The session of all tests of this folder but those of sessions themselves."""
    return spark_session
