-- Spark queries that consume queues. The epoch is the fence: the query that opened a stream last has the highest.
CREATE TABLE {stream} (
  id INTEGER NOT NULL PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  epoch INTEGER NOT NULL,
  acked_seq INTEGER NOT NULL,
  opened_at INTEGER
);

-- A stream's claim and its number: the messages of a batch, and how it is cut into slices.
CREATE TABLE {stream_claim} (
  stream INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  claimed_at INTEGER NOT NULL,
  messages INTEGER NOT NULL,
  slices TEXT NOT NULL,
  PRIMARY KEY (stream, seq)
) WITHOUT ROWID;

-- The messages of a claim, in the order of slices, each with its outcome if one was recorded. In a table beside the
-- message: workers pay nothing for it.
CREATE TABLE {stream_message} (
  stream INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  id BLOB NOT NULL,
  outcome TEXT CHECK (outcome IN ('ack', 'nack', 'reject')),
  delay INTEGER,
  reason TEXT,
  PRIMARY KEY (stream, seq, id)
) WITHOUT ROWID;
