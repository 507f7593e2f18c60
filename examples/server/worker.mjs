// A worker in Node: subscribes to a queue by gRPC and acks each message.
//
//   npm install @grpc/grpc-js @grpc/proto-loader
//   node worker.mjs localhost:8421 orders path/to/millpond.proto
//
// MILLPOND_TOKEN is the token, if the server needs one. COUNT ends the worker after this many messages.
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`); // packages of the folder in which it runs
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [address, queue, proto] = process.argv.slice(2);
const description = grpc.loadPackageDefinition(protoLoader.loadSync(proto, { keepCase: true, defaults: true }));
const client = new description.millpond.v1.Millpond(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
if (process.env.MILLPOND_TOKEN) metadata.set("authorization", `Bearer ${process.env.MILLPOND_TOKEN}`);
let left = Number(process.env.COUNT || Infinity);

function subscribe() {
  let over = false;
  const again = () => { // an error is followed by the end: subscribe once
    if (!over) setTimeout(subscribe, 1000);
    over = true;
  };
  const stream = client.MessageStream({ queues: [queue], max_messages: 50, lease: 30 }, metadata);
  const settled = (number) => (error, reply) => {
    if (error) return console.error("settle:", error.message); // the messages come again after their lease
    left -= number - reply.refused.length;
    if (left <= 0) {
      stream.cancel();
      client.close();
      process.exit(0);
    }
  };
  stream.on("data", ({ messages }) => {
    const done = [];
    for (const message of messages) {
      try {
        console.log(message.id, JSON.parse(message.body.toString()));
        done.push(message.receipt);
      } catch (error) { // one bad body does not end the worker; it is kept as FAILED
        const reject = { receipts: [message.receipt], reason: "no JSON", error: String(error) };
        client.MessageReject(reject, metadata, settled(1));
      }
    }
    if (done.length) client.MessageAck({ receipts: done }, metadata, settled(done.length));
  });
  stream.on("error", (error) => {
    if (error.code === grpc.status.CANCELLED) return;
    console.error("stream:", error.message);
    again(); // the server restarts
  });
  stream.on("end", again);
}

subscribe();
