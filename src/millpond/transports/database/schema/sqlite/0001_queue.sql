-- Times are microseconds since 1970 in UTC; ids are the 16 bytes of a UUID.
CREATE TABLE {message} (
  id BLOB NOT NULL PRIMARY KEY,
  created_at INTEGER NOT NULL,
  due_at INTEGER NOT NULL,
  expires_at INTEGER,
  first_attempt_at INTEGER,
  last_attempt_at INTEGER,
  acquired_at INTEGER,
  lease_until INTEGER,
  token INTEGER,
  worker INTEGER,
  deliveries INTEGER NOT NULL DEFAULT 0,
  attempts INTEGER NOT NULL DEFAULT 0,
  priority INTEGER NOT NULL,
  lane INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  queue TEXT NOT NULL,
  key TEXT,
  headers TEXT,
  last_error TEXT,
  payload BLOB NOT NULL
);

-- The state comes last, so that counting by state reads the index only.
CREATE INDEX {prefix}message_claim ON {message} (queue, lane, due_at, id, state) WHERE state <> 'PROCESSING';

CREATE INDEX {prefix}message_lease ON {message} (lease_until) WHERE state = 'PROCESSING';

CREATE TABLE {archive} (
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

CREATE INDEX {prefix}message_archive_queue ON {archive} (queue, state, archived_at, id);

CREATE INDEX {prefix}message_archive_id ON {archive} (id);

CREATE TABLE {dedupe} (
  id BLOB NOT NULL PRIMARY KEY,
  publisher INTEGER NOT NULL,
  expires_at INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX {prefix}message_dedupe_expiry ON {dedupe} (expires_at);

-- What handlers did once, by message and key of their own.
CREATE TABLE {once} (
  id BLOB NOT NULL,
  key TEXT NOT NULL,
  token INTEGER NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (id, key)
) WITHOUT ROWID;

CREATE TABLE {queue} (
  name TEXT NOT NULL PRIMARY KEY,
  paused INTEGER NOT NULL DEFAULT 0,
  keep_completed INTEGER,
  keep_failed INTEGER
);

CREATE TABLE {worker} (
  id INTEGER NOT NULL PRIMARY KEY,
  name TEXT NOT NULL,
  started_at INTEGER NOT NULL,
  beat_at INTEGER NOT NULL,
  -- 1: its lock tells whether it lives; 0: its session keeps changing, so only its leases do.
  by_lock INTEGER NOT NULL
);
