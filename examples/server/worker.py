"""A worker on another machine: subscribes by gRPC, without a connection to the database.

    python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. millpond.proto
    python worker.py localhost:8421 orders

MILLPOND_TOKEN is the token, if the server needs one. COUNT ends the worker after this many messages. A server that
stops or dies gives the messages back; the worker subscribes again when it answers.
"""

import json
import os
import sys
import time

import grpc
import millpond_pb2 as pb
import millpond_pb2_grpc


def work(address: str, queue: str) -> None:
    token = os.environ.get("MILLPOND_TOKEN")
    metadata = [("authorization", f"Bearer {token}")] if token else []
    left = int(os.environ.get("COUNT", sys.maxsize))
    with grpc.insecure_channel(address) as channel:
        server = millpond_pb2_grpc.MillpondStub(channel)
        while left > 0:
            try:
                request = pb.MessageStreamRequest(queues=[queue], max_messages=50)
                for reply in server.MessageStream(request, metadata=metadata):
                    receipts = []
                    for message in reply.messages:
                        try:
                            print(message.id, json.loads(message.body), flush=True)
                            receipts.append(message.receipt)
                        except ValueError as error:  # one bad body does not end the worker; it is kept as FAILED
                            rejected = pb.MessageRejectRequest(
                                receipts=[message.receipt], reason="no JSON", error=str(error)
                            )
                            server.MessageReject(rejected, metadata=metadata)
                    refused = server.MessageAck(pb.MessageAckRequest(receipts=receipts), metadata=metadata).refused
                    left -= len(reply.messages) - len(refused)
                    if left <= 0:
                        return
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            time.sleep(0.5)


if __name__ == "__main__":
    work(*sys.argv[1:])
