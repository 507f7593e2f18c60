
CREATE TABLE IF NOT EXISTS "message_migration" (version INTEGER NOT NULL PRIMARY KEY, name VARCHAR(100) NOT NULL, applied_at BIGINT NOT NULL);

CREATE TABLE "message" (
  id BLOB NOT NULL PRIMARY KEY CHECK (typeof(id) = 'blob' AND length(id) = 16),
  created_at INTEGER NOT NULL,
  due_at INTEGER NOT NULL,
  expires_at INTEGER,
  first_attempt_at INTEGER,
  last_attempt_at INTEGER,
  acquired_at INTEGER,
  lease INTEGER,
  lease_until INTEGER,
  token INTEGER,
  worker INTEGER,
  deliveries INTEGER NOT NULL DEFAULT 0,
  attempts INTEGER NOT NULL DEFAULT 0,
  crashes INTEGER NOT NULL DEFAULT 0,
  priority INTEGER NOT NULL,
  lane INTEGER NOT NULL,
  ahead INTEGER NOT NULL DEFAULT 0,
  state TEXT NOT NULL CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  queue TEXT NOT NULL,
  key TEXT,
  headers TEXT,
  last_error TEXT,
  payload BLOB NOT NULL
);

CREATE INDEX message_claim ON "message" (queue, lane, due_at, id, state) WHERE state <> 'PROCESSING';

CREATE INDEX message_lease ON "message" (lease_until, worker, token) WHERE state = 'PROCESSING';

CREATE TABLE "message_archive" (
  id BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  due_at INTEGER NOT NULL,
  expires_at INTEGER,
  first_attempt_at INTEGER,
  last_attempt_at INTEGER,
  acquired_at INTEGER,
  archived_at INTEGER NOT NULL,
  token INTEGER,
  deliveries INTEGER NOT NULL,
  attempts INTEGER NOT NULL,
  priority INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('COMPLETED', 'FAILED')),
  queue TEXT NOT NULL,
  key TEXT,
  reason TEXT,
  error TEXT,
  headers TEXT,
  payload BLOB NOT NULL
);

CREATE INDEX message_archive_queue ON "message_archive" (queue, state, archived_at, id);

CREATE INDEX message_archive_id ON "message_archive" (id);

CREATE TABLE "message_dedupe" (
  id BLOB NOT NULL PRIMARY KEY,
  publisher INTEGER NOT NULL,
  expires_at INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX message_dedupe_expiry ON "message_dedupe" (expires_at);

CREATE TABLE "message_once" (
  id BLOB NOT NULL,
  key TEXT NOT NULL,
  token INTEGER NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (id, key)
) WITHOUT ROWID;

CREATE TABLE "message_queue" (
  name TEXT NOT NULL PRIMARY KEY,
  paused INTEGER NOT NULL DEFAULT 0,
  keep_completed INTEGER,
  keep_failed INTEGER
);

CREATE TABLE "message_worker" (
  id INTEGER NOT NULL PRIMARY KEY,
  name TEXT NOT NULL,
  started_at INTEGER NOT NULL,
  beat_at INTEGER NOT NULL,
  beats INTEGER NOT NULL,
  dead_after INTEGER NOT NULL,
  lease INTEGER NOT NULL,
  doubted_at INTEGER,
  by_lock INTEGER NOT NULL,
  stopping INTEGER NOT NULL
);

INSERT INTO "message_migration" (version, name, applied_at) VALUES (1, 'queue', coalesce(NULL, CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000));

CREATE TABLE "message_stream" (
  id INTEGER NOT NULL PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  epoch INTEGER NOT NULL,
  acked_seq INTEGER NOT NULL,
  opened_at INTEGER
);

CREATE TABLE "message_stream_claim" (
  stream INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  claimed_at INTEGER NOT NULL,
  messages INTEGER NOT NULL,
  slices TEXT NOT NULL,
  PRIMARY KEY (stream, seq)
) WITHOUT ROWID;

CREATE TABLE "message_stream_message" (
  stream INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  id BLOB NOT NULL,
  outcome TEXT CHECK (outcome IN ('ack', 'nack', 'reject')),
  delay INTEGER,
  reason TEXT,
  PRIMARY KEY (stream, seq, id)
) WITHOUT ROWID;

INSERT INTO "message_migration" (version, name, applied_at) VALUES (2, 'streams', coalesce(NULL, CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000));

CREATE TABLE "message_lot" (
  lot INTEGER NOT NULL PRIMARY KEY,
  batch INTEGER NOT NULL,
  at INTEGER NOT NULL,
  writer TEXT NOT NULL
);

CREATE INDEX message_lot_writer ON "message_lot" (writer, batch);

CREATE TABLE "message_staging" (
  lot INTEGER NOT NULL,
  id BLOB NOT NULL,
  due_at INTEGER,
  priority INTEGER NOT NULL,
  queue TEXT NOT NULL,
  key TEXT,
  headers TEXT,
  payload BLOB NOT NULL
);

CREATE INDEX message_staging_lot ON "message_staging" (lot, id);

CREATE TABLE "message_written" (
  writer TEXT NOT NULL,
  part INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  size INTEGER NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (writer, part)
) WITHOUT ROWID;

INSERT INTO "message_migration" (version, name, applied_at) VALUES (3, 'staging', coalesce(NULL, CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000));

CREATE TABLE "message_export" (
  lake TEXT NOT NULL PRIMARY KEY,
  shard INTEGER NOT NULL,
  until INTEGER,
  at INTEGER NOT NULL,
  path TEXT NOT NULL
);

INSERT INTO "message_migration" (version, name, applied_at) VALUES (4, 'exports', coalesce(NULL, CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000));

CREATE TABLE "message_export_range" (
  lake TEXT NOT NULL,
  since INTEGER NOT NULL,
  until INTEGER NOT NULL,
  messages INTEGER NOT NULL,
  purged INTEGER NOT NULL,
  PRIMARY KEY (lake, since)
) WITHOUT ROWID;

CREATE INDEX message_archive_time ON "message_archive" (archived_at);

INSERT INTO "message_migration" (version, name, applied_at) VALUES (5, 'export_ranges', coalesce(NULL, CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000));
