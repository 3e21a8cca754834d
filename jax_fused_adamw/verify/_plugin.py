"""A pytest plugin: the tests' own process puts its facts into the JUnit file."""

import json

import pytest


@pytest.fixture(scope="session", autouse=True)
def record_facts(record_testsuite_property):
    yield
    # Not at the top: conftest.py sets what JAX reads before it is imported.
    from jax_fused_adamw.verify._facts import gather

    record_testsuite_property("facts", json.dumps(gather()))
