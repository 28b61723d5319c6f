"""Streams, new or existing, are configured as the settings say, or refused with the reason."""

import asyncio
import dataclasses

import nats.errors
import pytest
from nats.aio.client import Client, ServerVersion
from nats.js import api
from nats.js.errors import APIError

from turnkeep_client.subjects import SessionKey, Subjects
from worker.process.constants import Constants
from worker.wire import streams
from worker.wire.connection import BrokerError, connect, loses_entries, server_version
from worker.wire.log_room import open_bytes
from worker.wire.streams import CONSUMER, ensure, ensure_stream

SUBJECTS = Subjects("turnkeep")
KEY = SessionKey("default", "s1")


@pytest.fixture
async def client(server):
    await server.start()
    client = await connect(server.url, name="test", token=server.token)
    yield client
    await client.close()


@pytest.fixture
def js(client):
    return client.jetstream()


async def test_the_log_stream_refuses_messages_when_full_and_the_token_stream_drops_old_messages(
    js, settings
):
    await ensure(js, SUBJECTS, settings)
    log = (await js.stream_info("turnkeep_log")).config
    assert (log.storage, log.discard, log.max_bytes, log.max_age) == ("file", "new", open_bytes(2**26), 0)
    assert log.allow_direct
    tokens = (await js.stream_info("turnkeep_tok")).config
    assert (tokens.storage, tokens.discard, tokens.max_age) == ("file", "old", 900)
    assert tokens.allow_direct


async def test_subscribers_receive_a_result_only_if_the_log_has_stored_it(client, js, settings):
    await ensure(js, SUBJECTS, settings)
    heard = await client.subscribe(SUBJECTS.of(KEY, "out"))
    fence = {"Nats-Expected-Last-Subject-Sequence": "0"}
    ack = await js.publish(SUBJECTS.of(KEY, "commit"), b"first", headers=fence)
    with pytest.raises(APIError, match="wrong last sequence"):
        await js.publish(SUBJECTS.of(KEY, "commit"), b"second", headers=fence)
    message = await heard.next_msg(timeout=5)
    assert (message.data, message.headers["Nats-Sequence"]) == (b"first", str(ack.seq))
    with pytest.raises(nats.errors.TimeoutError):
        await heard.next_msg(timeout=0.3)
    assert (await js.get_last_msg("turnkeep_log", SUBJECTS.of(KEY, "out"))).data == b"first"


async def test_workers_with_different_settings_can_create_the_nats_streams_at_the_same_time(js, settings):
    others = [dataclasses.replace(settings, log_max_bytes=size) for size in (2**24, 2**25, 2**26)]
    await asyncio.gather(*(ensure(js, SUBJECTS, other) for other in others))
    assert (await js.stream_info("turnkeep_log")).config.max_bytes in map(open_bytes, (2**24, 2**25, 2**26))


async def test_changed_settings_are_applied_to_existing_nats_streams_and_their_messages_stay(js, settings):
    await ensure(js, SUBJECTS, settings)
    await js.publish(SUBJECTS.of(KEY, "in"), b"request")
    log = (await js.stream_info("turnkeep_log")).config
    await js.update_stream(log.evolve(description="an operator's words"))
    changed = dataclasses.replace(
        settings,
        log_max_bytes=2**25,
        max_message_bytes=2**15,
    )
    await ensure(js, SUBJECTS, changed, Constants(token_ttl_s=60.0, ack_wait_s=9.0))
    info = await js.stream_info("turnkeep_log")
    assert (info.config.max_bytes, info.state.messages) == (open_bytes(2**25), 1)
    assert info.config.description == "an operator's words"
    assert (await js.stream_info("turnkeep_tok")).config.max_age == 60
    assert (await js.consumer_info("turnkeep_log", CONSUMER)).config.ack_wait == 9.0
    with pytest.raises(APIError, match="message size exceeds maximum allowed"):
        await js.publish(SUBJECTS.of(KEY, "in"), b"x" * 2**17)


async def test_the_log_stream_stores_a_message_of_the_maximum_size_including_its_headers(js, settings):
    await ensure(js, SUBJECTS, settings)
    headers = {"traceparent": "y" * 1000}
    body = b"x" * (settings.max_message_bytes - 1100)
    assert await js.publish(SUBJECTS.of(KEY, "in"), body, headers=headers)


async def test_a_full_log_stream_refuses_new_messages_and_keeps_its_old_messages(js, settings):
    await ensure(js, SUBJECTS, dataclasses.replace(settings, log_max_bytes=2**20))
    await js.publish(SUBJECTS.of(KEY, "in"), b"x" * 2**19)
    with pytest.raises(APIError, match="maximum bytes exceeded"):
        await js.publish(SUBJECTS.of(KEY, "in"), b"x" * 2**19)
    assert (await js.stream_info("turnkeep_log")).state.first_seq == 1


async def test_a_size_limit_below_the_size_of_the_log_is_refused_and_a_log_full_to_its_limit_is_accepted(
    js, settings
):
    """By one entry's overhead a full log may be larger than its limit: its workers can start again."""
    full, lower = (dataclasses.replace(settings, log_max_bytes=size) for size in (2**20, 2**20 - 2**15))
    await ensure(js, SUBJECTS, full)
    config = (await js.stream_info("turnkeep_log")).config
    await js.update_stream(config.evolve(max_bytes=2**20 + 2**10))
    await js.publish(SUBJECTS.of(KEY, "in"), b"x" * 2**19)
    await js.publish(SUBJECTS.of(KEY, "in"), b"x" * (2**19 - 100))
    await ensure(js, SUBJECTS, full)
    with pytest.raises(BrokerError, match="the log has 1 MiB, more than log_max_bytes"):
        await ensure(js, SUBJECTS, lower)
    assert (await js.stream_info("turnkeep_log")).config.max_bytes == open_bytes(2**20)


async def test_messages_of_two_tenants_with_the_same_message_id_are_both_stored(js, settings):
    await ensure(js, SUBJECTS, settings)
    headers = {"Nats-Msg-Id": "1"}
    await js.publish(SUBJECTS.of(SessionKey("a", "s"), "in"), b"x", headers=headers)
    await asyncio.sleep(0.3)
    ack = await js.publish(SUBJECTS.of(SessionKey("b", "s"), "in"), b"y", headers=headers)
    assert not ack.duplicate


async def test_creating_the_log_stream_fails_and_names_another_nats_stream_that_has_its_subjects(
    js, settings
):
    await js.add_stream(name="theirs", subjects=["turnkeep.>"], no_ack=True)
    with pytest.raises(
        BrokerError, match="belong to the stream theirs; remove that stream, or choose another --prefix"
    ):
        await ensure(js, SUBJECTS, settings)


async def test_a_subject_prefix_whose_log_stream_name_belongs_to_another_prefix_is_refused(js, settings):
    await ensure(js, Subjects("a.b"), settings)
    with pytest.raises(BrokerError, match=r"a_b_log exists with the subjects a\.b.*choose another --prefix"):
        await ensure(js, Subjects("a_b"), settings)


async def test_an_empty_log_stream_of_another_version_is_upgraded_and_a_log_stream_with_messages_is_refused(
    js, settings
):
    subjects = [SUBJECTS.every("in"), SUBJECTS.every("commit")]
    await js.add_stream(name="turnkeep_log", subjects=subjects, metadata={"owner": "ops"})
    await ensure(js, SUBJECTS, settings)
    assert (await js.publish(SUBJECTS.of(KEY, "checkpoint"), b"x")).seq == 1
    config = (await js.stream_info("turnkeep_log")).config
    assert config.metadata["owner"] == "ops"
    await ensure(js, SUBJECTS, settings)
    await js.delete_stream("turnkeep_log")
    await js.add_stream(name="turnkeep_log", subjects=subjects)
    await js.publish(SUBJECTS.of(KEY, "in"), b"kept")
    with pytest.raises(BrokerError, match=r"turnkeep_log was written by another version.*another --prefix"):
        await ensure(js, SUBJECTS, settings)


async def test_a_token_stream_of_an_earlier_version_is_upgraded_to_store_chunk_subjects(client, js, settings):
    await js.add_stream(name="turnkeep_tok", subjects=[SUBJECTS.every_token()])
    await js.publish(SUBJECTS.tokens(KEY, "g"), b"kept")
    await ensure(js, SUBJECTS, settings)
    heard = await client.subscribe(SUBJECTS.tokens(KEY, "g"))
    assert (await js.publish(SUBJECTS.tokens(KEY, "g", "chunk"), b"new")).seq == 2
    assert (await heard.next_msg(timeout=5)).data == b"new"
    await ensure(js, SUBJECTS, settings)  # as it is


async def test_a_log_stream_with_memory_storage_is_refused(js, settings):
    await js.add_stream(
        name="turnkeep_log", subjects=[SUBJECTS.every("in"), SUBJECTS.every("commit")], storage="memory"
    )
    with pytest.raises(BrokerError, match="exists with storage memory instead of file"):
        await ensure(js, SUBJECTS, settings)


async def test_a_nats_server_without_space_for_the_log_is_refused_with_advice(
    foreign_server, settings, tmp_path
):
    url = await foreign_server(jetstream={"store_dir": str(tmp_path / "js"), "max_file_store": 2**20})
    client = await connect(url, name="test")
    with pytest.raises(BrokerError, match=r"no room for the stream turnkeep_log.*--log-max-bytes"):
        await ensure(client.jetstream(), SUBJECTS, settings)
    in_memory = api.StreamConfig(name="m", max_bytes=2**50, storage=api.StorageType.MEMORY)
    with pytest.raises(BrokerError, match=r"no room for the stream m, .*; raise its JetStream memory limit"):
        await ensure_stream(client.jetstream(), in_memory)
    await client.close()


async def test_deleting_the_log_stream_ends_the_workers_stream_check_with_an_error(js, settings, monkeypatch):
    monkeypatch.setattr(streams, "_KEEP_S", 0.1)
    await ensure(js, SUBJECTS, settings)
    keeping = asyncio.create_task(streams.keep(js, SUBJECTS, settings))
    await asyncio.sleep(0.3)
    assert not keeping.done()
    await js.delete_stream("turnkeep_log")
    with pytest.raises(BrokerError, match="turnkeep_log has vanished"):
        await asyncio.wait_for(keeping, 5)


async def test_a_log_stream_deleted_during_a_stream_check_is_not_created_again_and_raises_an_error(
    js, settings, monkeypatch
):
    """An empty one would look as if nobody had ever asked anything."""
    monkeypatch.setattr(streams, "_KEEP_S", 0.1)
    await ensure(js, SUBJECTS, settings)

    async def vanishes(js, stream):
        await js.delete_stream(stream)
        return True

    monkeypatch.setattr(streams, "_is_ahead", vanishes)
    with pytest.raises(BrokerError, match="turnkeep_log has vanished"):
        await asyncio.wait_for(streams.keep(js, SUBJECTS, settings), 5)


LOSING = ("2.10.26", "2.11.11", "2.12.15", "2.13.0", "2.14.0-RC.1", "2.14.5")
KEEPING = ("2.12.16", "2.14.6", "2.15.0", "2.16.0-dev", "3.0.0", "mine", None)


async def test_nats_server_versions_that_can_lose_log_entries_are_recognised_by_their_number(
    client, monkeypatch
):
    for version in (*LOSING, *KEEPING):
        with monkeypatch.context() as patched:
            if version:
                patched.setattr(Client, "connected_server_version", ServerVersion(version))
            told = loses_entries(server_version(client))
        assert ("install 2.12.16, 2.14.6, 2.15.0 or newer" in told) == (version in LOSING), version
        assert (told == "") == (version in KEEPING), version
