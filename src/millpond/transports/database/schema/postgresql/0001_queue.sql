-- Times are microseconds since 1970 in UTC. Wide columns last, so that the narrow ones need no padding.
CREATE TABLE {message} (
  id uuid NOT NULL,
  created_at bigint NOT NULL,
  due_at bigint NOT NULL,
  expires_at bigint,
  first_attempt_at bigint,
  last_attempt_at bigint,
  acquired_at bigint,
  lease_until bigint,
  token bigint,
  worker bigint,
  deliveries integer NOT NULL DEFAULT 0,
  attempts integer NOT NULL DEFAULT 0,
  priority smallint NOT NULL,
  lane smallint NOT NULL,
  state text COLLATE "C" NOT NULL CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  queue text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  headers text,
  last_error text,
  payload bytea NOT NULL,
  -- Half empty: a claim writes each row anew, with another entry of the same id, and then no page splits.
  PRIMARY KEY (id) WITH (fillfactor = 45)
) WITH (
  -- A queue's rows live for moments: vacuum often and at full speed, and analyze little, since no plan
  -- depends on its statistics.
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_scale_factor = 0.2,
  autovacuum_analyze_threshold = 10000,
  -- The empty end of the table is soon filled again, and giving it back locks everybody out for a moment.
  vacuum_truncate = off
);

-- What a claim reads, in its order. Claimed rows are not in it, however many there are.
CREATE INDEX {prefix}message_claim ON {message} (queue, lane, due_at, id) WHERE state <> 'PROCESSING';

CREATE INDEX {prefix}message_lease ON {message} (lease_until) WHERE state = 'PROCESSING';

CREATE TABLE {archive} (
  id uuid NOT NULL,
  created_at bigint NOT NULL,
  due_at bigint NOT NULL,
  expires_at bigint,
  first_attempt_at bigint,
  last_attempt_at bigint,
  acquired_at bigint,
  archived_at bigint NOT NULL,
  token bigint,
  deliveries integer NOT NULL,
  attempts integer NOT NULL,
  priority smallint NOT NULL,
  state text COLLATE "C" NOT NULL CHECK (state IN ('COMPLETED', 'FAILED')),
  queue text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  reason text,
  error text,
  headers text,
  payload bytea NOT NULL
) PARTITION BY RANGE (archived_at);

-- Takes what no day's partition was made for; purge makes those ahead.
CREATE TABLE {archive_default} PARTITION OF {archive} DEFAULT;

CREATE INDEX {prefix}message_archive_queue ON {archive} (queue, state, archived_at, id);

CREATE INDEX {prefix}message_archive_id ON {archive} (id);

CREATE TABLE {dedupe} (
  id uuid PRIMARY KEY,
  publisher bigint NOT NULL,
  expires_at bigint NOT NULL
);

CREATE INDEX {prefix}message_dedupe_expiry ON {dedupe} (expires_at);

-- What handlers did once, by message and key of their own.
CREATE TABLE {once} (
  id uuid NOT NULL,
  key text COLLATE "C" NOT NULL,
  token bigint NOT NULL,
  at bigint NOT NULL,
  PRIMARY KEY (id, key)
);

CREATE TABLE {queue} (
  name text COLLATE "C" PRIMARY KEY,
  paused smallint NOT NULL DEFAULT 0,
  keep_completed bigint,
  keep_failed bigint
);

CREATE TABLE {worker} (
  id bigint PRIMARY KEY,
  name text NOT NULL,
  started_at bigint NOT NULL,
  beat_at bigint NOT NULL,
  -- 1: its lock tells whether it lives; 0: its session keeps changing, so only its leases do.
  by_lock smallint NOT NULL
);
