import asyncio

import grpc
import pytest
from kvpb.v1 import store_pb2, store_pb2_grpc

from kvstore.errors import ConfigError, LeaseExpired, Overloaded
from kvstore.rpc.channel import open_channel
from kvstore.rpc.server import MAX_MESSAGE_BYTES, bind, guarded, make_server
from kvstore.units import seconds


class Servicer(store_pb2_grpc.StoreServiceServicer):
    @guarded
    async def Hello(self, request, context):
        raise Overloaded("come back later")

    @guarded
    async def ReadPayloads(self, request, context):
        await context.write(store_pb2.ReadChunk(item=3))
        raise LeaseExpired("too late")

    @guarded
    async def Reserve(self, request, context):
        return store_pb2.ReserveResponse()

    @guarded
    async def Renew(self, request, context):
        return store_pb2.RenewResponse()

    @guarded
    async def WritePayloads(self, chunks, context):
        await anext(chunks)  # nothing is said meanwhile
        return store_pb2.WriteResponse()


def with_server(scenario, **bounds):
    async def run():
        server = make_server(**bounds)
        store_pb2_grpc.add_StoreServiceServicer_to_server(Servicer(), server)
        port = bind(server, host="127.0.0.1", port=0)
        await server.start()
        channel = open_channel(f"127.0.0.1:{port}")
        try:
            return await scenario(store_pb2_grpc.StoreServiceStub(channel), port)
        finally:
            await channel.close()
            await server.stop(0)

    return asyncio.run(run())


def test_an_error_of_ours_arrives_as_its_code_and_message():
    async def scenario(stub, port):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Hello(store_pb2.HelloRequest())
        return caught.value.code(), caught.value.details()

    assert with_server(scenario) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "come back later")


def test_an_error_in_the_middle_of_a_stream_arrives_after_what_was_sent_before():
    async def scenario(stub, port):
        call = stub.ReadPayloads(store_pb2.ReadRequest())
        first = await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return first.item, caught.value.code()

    assert with_server(scenario) == (3, grpc.StatusCode.ABORTED)


def test_a_message_above_the_limit_is_refused_and_the_server_goes_on():
    async def scenario(stub, port):
        huge = store_pb2.ReserveRequest(key_space=store_pb2.KeySpace(layout_fingerprint=bytes(MAX_MESSAGE_BYTES + 1)))
        server_limited = store_pb2_grpc.StoreServiceStub(
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)])
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server_limited.Reserve(huge)
        await stub.Reserve(store_pb2.ReserveRequest())
        return caught.value.code()

    assert with_server(scenario) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_message_that_is_no_protobuf_is_refused_with_one_line_in_the_log(caplog):
    async def scenario(stub, port):
        channel = open_channel(f"127.0.0.1:{port}")
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/kvpb.v1.StoreService/Reserve")(b"\xff\xff\xff\xff\x07")
        await channel.close()
        await stub.Reserve(store_pb2.ReserveRequest())

    with_server(scenario)
    (record,) = [record for record in caplog.records if "parse" in record.getMessage()]
    assert "ReserveRequest" in record.getMessage()
    assert record.exc_info is None


def test_a_port_in_use_is_a_config_error_and_no_second_listener():
    async def scenario(stub, port):
        with pytest.raises(ConfigError, match=str(port)):
            bind(make_server(), host="127.0.0.1", port=port)

    with_server(scenario)


HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


async def closed(reader):
    """Takes what comes until the server closes the connection."""
    async with asyncio.timeout(20):
        while await reader.read(4096):
            pass


def test_a_connection_without_a_call_is_closed_and_a_silent_stream_and_the_next_call_are_not_hurt():
    async def scenario(stub, port):
        say = asyncio.Event()

        async def chunks():
            await say.wait()
            yield store_pb2.WriteChunk(write_token=1)

        stream = stub.WritePayloads(chunks())
        await stream.wait_for_connection()
        caller = open_channel(f"127.0.0.1:{port}")
        renew = store_pb2_grpc.StoreServiceStub(caller).Renew
        await renew(store_pb2.RenewRequest())
        for greeting in (HTTP2_GREETING, HTTP2_GREETING[:10], b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(greeting)
            await closed(reader)  # longer than the caller and the stream were silent already
            writer.close()
        await renew(store_pb2.RenewRequest())
        say.set()
        assert await stream == store_pb2.WriteResponse()
        await caller.close()

    with_server(scenario, idle=seconds(0.2))


def test_connections_beyond_the_limit_are_closed_and_those_before_are_served():
    async def scenario(stub, port):
        await stub.Renew(store_pb2.RenewRequest())
        within = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, writer in within:
            writer.write(HTTP2_GREETING)
            assert await asyncio.wait_for(reader.read(4096), 20), "greeted"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_GREETING)
        await closed(reader)
        await stub.Renew(store_pb2.RenewRequest())
        for _, writer in within:
            writer.close()

    with_server(scenario, most_connections=4)
