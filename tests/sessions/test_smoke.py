async def test_the_chunks_of_a_generate_over_nats_add_up_to_its_result(local_worker):
    worker = await local_worker()
    session = worker.client.session("s")
    appended = await session.append(text="hello world")
    assert (appended.position, appended.prefilled_tokens) == (11, 10), "the last one waits for the answer"
    generation = session.generate(max_tokens=20)
    chunks = [chunk async for chunk in generation]
    assert "".join(chunk.text for chunk in chunks) == generation.result.text
    assert tuple(t for chunk in chunks for t in chunk.tokens) == generation.result.tokens
