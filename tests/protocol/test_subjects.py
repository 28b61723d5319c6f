"""Subjects can be built and parsed back to their parts; strings of another form are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.subjects import Subjects, check_id, session_key

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
prefixes = st.sampled_from(["turnkeep", "a.b", "x-1._y"])


@given(prefixes, ids, ids, st.sampled_from(["in", "out", "ctl", "ask"]), ids)
def test_every_subject_that_is_built_is_parsed_back_to_its_parts(
    prefix: str, tenant: str, session: str, kind, request_id: str
) -> None:
    subjects, key = Subjects(prefix), session_key(tenant, session)
    assert subjects.parse(subjects.of(key, kind)) == (key, kind, None)
    assert subjects.parse(subjects.tokens(key, request_id)) == (key, "tok", request_id)
    assert subjects.parse(subjects.tokens(key, request_id, "chunk")) == (key, "chunk", request_id)


@given(st.text())
def test_a_valid_id_has_at_most_64_characters_and_none_that_is_special_in_nats_subjects(text: str) -> None:
    try:
        check_id("session", text)
    except InvalidMessageError:
        return
    assert len(text) <= 64
    assert not set(text) & set(". *>\n\t\0/\\")


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "*", ">", "-a", "_a", "a\n", "ä", "x" * 65, "a\0"])
def test_an_invalid_tenant_or_session_id_is_refused_and_named(bad: str) -> None:
    with pytest.raises(InvalidMessageError, match=r"tenant .* is not valid: it must be 1 to 64"):
        session_key(bad, "s1")
    with pytest.raises(InvalidMessageError, match=r"session .* is not valid"):
        session_key("t1", bad)


@pytest.mark.parametrize(
    "subject",
    [
        "turnkeep.t.s",
        "turnkeep.t.s.in.x",
        "turnkeep.t.s.tok",
        "turnkeep.t.s.tok.a.b",
        "turnkeep.t.s.other",
        "turnkeep._metrics.w",
        "turnkeep._t.s.in",
        "turnkeep.t.s\n.in",
        "other.t.s.in",
        "turnkeepx.t.s.in",
        "",
    ],
)
def test_parsing_a_subject_of_another_form_or_prefix_is_refused(subject: str) -> None:
    with pytest.raises(InvalidMessageError):
        Subjects().parse(subject)


@pytest.mark.parametrize("prefix", ["", ".", "a.", ".a", "a..b", "a b", "*", "a.>", "ä", "a\n"])
def test_a_prefix_that_cannot_start_a_subject_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidMessageError, match="subject prefix"):
        Subjects(prefix)


def test_wildcard_subjects_and_stream_names_are_derived_from_the_prefix() -> None:
    subjects = Subjects("a.b")
    assert subjects.every("in") == "a.b.*.*.in"
    assert subjects.every_token() == "a.b.*.*.tok.*"
    assert subjects.every_token("chunk") == "a.b.*.*.chunk.*"
    assert subjects.metrics("*") == "a.b._metrics.*"
    assert (subjects.log_stream, subjects.token_stream) == ("a_b_log", "a_b_tok")
