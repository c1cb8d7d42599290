import asyncio

import grpc
import pytest
from kvpb.v1 import store_pb2, store_pb2_grpc

from kvstore.errors import ConfigError, LeaseExpired, Overloaded
from kvstore.rpc.channel import open_channel
from kvstore.rpc.server import MAX_MESSAGE_BYTES, bind, guarded, make_server


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


def with_server(scenario):
    async def run():
        server = make_server()
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
