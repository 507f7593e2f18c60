-- Times are microseconds since 1970 in UTC; ids are the 16 bytes of a UUID.
CREATE TABLE {message} (
  id BLOB NOT NULL PRIMARY KEY CHECK (typeof(id) = 'blob' AND length(id) = 16),
  created_at INTEGER NOT NULL,
  due_at INTEGER NOT NULL,
  expires_at INTEGER,
  first_attempt_at INTEGER,
  last_attempt_at INTEGER,
  acquired_at INTEGER,
  -- Length of the lease. Null: not claimed, or held by a stream.
  lease INTEGER,
  -- End of the lease. Null while the beats of the worker extend it.
  lease_until INTEGER,
  token INTEGER,
  worker INTEGER,
  deliveries INTEGER NOT NULL DEFAULT 0,
  attempts INTEGER NOT NULL DEFAULT 0,
  crashes INTEGER NOT NULL DEFAULT 0,
  priority INTEGER NOT NULL,
  lane INTEGER NOT NULL,
  -- 1: claimed while other messages waited for a handler, so it may not have been started.
  ahead INTEGER NOT NULL DEFAULT 0,
  state TEXT NOT NULL CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  queue TEXT NOT NULL,
  key TEXT,
  headers TEXT,
  last_error TEXT,
  payload BLOB NOT NULL,
  -- A value of another type would be stored as it is, and found by no claim.
  CONSTRAINT {prefix}message_types CHECK (typeof(created_at) = 'integer' AND typeof(due_at) = 'integer'
    AND typeof(expires_at) IN ('integer', 'null') AND typeof(first_attempt_at) IN ('integer', 'null')
    AND typeof(last_attempt_at) IN ('integer', 'null') AND typeof(acquired_at) IN ('integer', 'null')
    AND typeof(lease) IN ('integer', 'null') AND typeof(lease_until) IN ('integer', 'null')
    AND typeof(token) IN ('integer', 'null') AND typeof(worker) IN ('integer', 'null')
    AND typeof(deliveries) = 'integer' AND typeof(attempts) = 'integer' AND typeof(crashes) = 'integer'
    AND typeof(priority) = 'integer' AND typeof(ahead) = 'integer' AND typeof(queue) = 'text'
    AND typeof(key) IN ('text', 'null') AND typeof(headers) IN ('text', 'null')),
  -- The lane is made of it, and claims read the lanes from 0 on.
  CONSTRAINT {prefix}message_priority CHECK (priority BETWEEN 0 AND 100),
  -- The years 1 to 9999: other times could not be shown.
  CONSTRAINT {prefix}message_times CHECK (created_at BETWEEN -62135596800000000 AND 253402300799999999
    AND due_at BETWEEN -62135596800000000 AND 253402300799999999 AND expires_at BETWEEN -62135596800000000 AND 253402300799999999)
);

-- The state comes last: counting by state then reads the index only.
CREATE INDEX {prefix}message_claim ON {message} (queue, lane, due_at, id, state) WHERE state <> 'PROCESSING';

CREATE INDEX {prefix}message_lease ON {message} (lease_until, worker, token) WHERE state = 'PROCESSING';

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

CREATE INDEX {prefix}archive_queue ON {archive} (queue, state, archived_at, id);

CREATE INDEX {prefix}archive_id ON {archive} (id);

CREATE TABLE {dedupe} (
  id BLOB NOT NULL PRIMARY KEY,
  publisher INTEGER NOT NULL,
  expires_at INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX {prefix}dedupe_expiry ON {dedupe} (expires_at);

-- Work that handlers did once, by message and by the handler's key.
CREATE TABLE {once} (
  id BLOB NOT NULL,
  key TEXT NOT NULL,
  token INTEGER NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (id, key)
) WITHOUT ROWID;

CREATE TABLE {queue} (
  name TEXT NOT NULL PRIMARY KEY,
  paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
  keep_completed INTEGER CHECK (typeof(keep_completed) <> 'real' AND keep_completed BETWEEN 0 AND 3153600000000000),
  keep_failed INTEGER CHECK (typeof(keep_failed) <> 'real' AND keep_failed BETWEEN 0 AND 3153600000000000)
);

CREATE TABLE {worker} (
  id INTEGER NOT NULL PRIMARY KEY,
  name TEXT NOT NULL,
  started_at INTEGER NOT NULL,
  beat_at INTEGER NOT NULL,
  -- Number of the last beat: it changes with each one, also if the clock is set back.
  beats INTEGER NOT NULL,
  -- Time of silence after which the worker is dead if its lock is free.
  dead_after INTEGER NOT NULL,
  -- Shortest lease of its claims, 0: unknown. No reaper reads them before it was silent for that time.
  lease INTEGER NOT NULL,
  -- When a reaper began to doubt that it lives. Null since its last beat.
  doubted_at INTEGER,
  -- 1: its lock shows whether it lives; 0: its session keeps changing, so only its leases do.
  by_lock INTEGER NOT NULL,
  -- 1: it is stopping; its death is no crash of its messages.
  stopping INTEGER NOT NULL
);
