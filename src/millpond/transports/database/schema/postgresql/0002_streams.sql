-- Spark queries that consume queues. The epoch is the fence: the query that opened a stream last has the highest.
CREATE TABLE {stream} (
  id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text COLLATE "C" NOT NULL UNIQUE,
  epoch bigint NOT NULL,
  acked_seq bigint NOT NULL,
  opened_at bigint
);

-- A stream's claim and its number: the messages of a batch, and how it is cut into slices.
CREATE TABLE {stream_claim} (
  stream integer NOT NULL,
  seq bigint NOT NULL,
  claimed_at bigint NOT NULL,
  messages bigint NOT NULL,
  slices text NOT NULL,
  PRIMARY KEY (stream, seq)
);

-- The messages of a claim, in the order of slices, each with its outcome if one was recorded. In a table beside the
-- message: workers pay nothing for it.
CREATE TABLE {stream_message} (
  seq bigint NOT NULL,
  stream integer NOT NULL,
  id uuid NOT NULL,
  outcome text COLLATE "C" CHECK (outcome IN ('ack', 'nack', 'reject')),
  delay bigint,
  reason text,
  PRIMARY KEY (stream, seq, id)
) WITH (
  -- As those of messages, its rows live for a short time.
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_cost_delay = 0,
  vacuum_truncate = off
);
