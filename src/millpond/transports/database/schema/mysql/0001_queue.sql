-- Times are microseconds since 1970 in UTC. IF NOT EXISTS: a CREATE commits by itself here, and a migration that was
-- cut short is run again. utf8mb4_bin: names differ when their letters differ, in any server's default collation.
CREATE TABLE IF NOT EXISTS {message} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  created_at BIGINT NOT NULL,
  due_at BIGINT NOT NULL,
  expires_at BIGINT,
  first_attempt_at BIGINT,
  last_attempt_at BIGINT,
  acquired_at BIGINT,
  -- Length of the lease. Null: not claimed, or held by a stream.
  lease BIGINT,
  -- End of the lease. Null while the beats of the worker extend it.
  lease_until BIGINT,
  token BIGINT,
  worker BIGINT,
  deliveries INT NOT NULL DEFAULT 0,
  attempts INT NOT NULL DEFAULT 0,
  crashes INT NOT NULL DEFAULT 0,
  priority SMALLINT NOT NULL,
  lane SMALLINT NOT NULL,
  -- 1: claimed while other messages waited for a handler, so it may not have been started.
  ahead SMALLINT NOT NULL DEFAULT 0,
  state VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin NOT NULL
    CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  -- There are no partial indexes here: this column keeps claimed rows out of the claim's part of its index.
  ready TINYINT AS (IF(state = 'PROCESSING', NULL, 1)) STORED,
  queue VARCHAR(255) NOT NULL,
  `key` VARCHAR(255),
  headers MEDIUMTEXT,
  last_error MEDIUMTEXT,
  payload LONGBLOB NOT NULL,
  -- The state comes last: counting by state then reads the index only.
  KEY {prefix}message_claim (queue, ready, lane, due_at, id, state),
  KEY {prefix}message_lease (lease_until, worker, token),
  -- The lane is made of it, and claims read the lanes from 0 on.
  CONSTRAINT {prefix}message_priority CHECK (priority BETWEEN 0 AND 100),
  -- The years 1 to 9999: other times could not be shown.
  CONSTRAINT {prefix}message_times CHECK (created_at BETWEEN -62135596800000000 AND 253402300799999999
    AND due_at BETWEEN -62135596800000000 AND 253402300799999999 AND expires_at BETWEEN -62135596800000000 AND 253402300799999999)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {archive} (
  id BINARY(16) NOT NULL,
  created_at BIGINT NOT NULL,
  due_at BIGINT NOT NULL,
  expires_at BIGINT,
  first_attempt_at BIGINT,
  last_attempt_at BIGINT,
  acquired_at BIGINT,
  archived_at BIGINT NOT NULL,
  token BIGINT,
  deliveries INT NOT NULL,
  attempts INT NOT NULL,
  priority SMALLINT NOT NULL,
  state VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin NOT NULL CHECK (state IN ('COMPLETED', 'FAILED')),
  queue VARCHAR(255) NOT NULL,
  `key` VARCHAR(255),
  reason MEDIUMTEXT,
  error MEDIUMTEXT,
  headers MEDIUMTEXT,
  payload LONGBLOB NOT NULL,
  -- In the order of archiving: purge then deletes neighbours.
  PRIMARY KEY (archived_at, id),
  KEY {prefix}archive_queue (queue, state, archived_at, id),
  KEY {prefix}archive_id (id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {dedupe} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  publisher BIGINT NOT NULL,
  expires_at BIGINT NOT NULL,
  KEY {prefix}dedupe_expiry (expires_at)
) ENGINE = InnoDB;

-- Work that handlers did once, by message and by the handler's key.
CREATE TABLE IF NOT EXISTS {once} (
  id BINARY(16) NOT NULL,
  `key` VARCHAR(255) NOT NULL,
  token BIGINT NOT NULL,
  at BIGINT NOT NULL,
  PRIMARY KEY (id, `key`)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {queue} (
  name VARCHAR(255) NOT NULL PRIMARY KEY,
  paused SMALLINT NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
  keep_completed BIGINT CHECK (keep_completed BETWEEN 0 AND 3153600000000000),
  keep_failed BIGINT CHECK (keep_failed BETWEEN 0 AND 3153600000000000)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {worker} (
  id BIGINT NOT NULL PRIMARY KEY,
  name VARCHAR(255) NOT NULL,
  started_at BIGINT NOT NULL,
  beat_at BIGINT NOT NULL,
  -- Number of the last beat: it changes with each one, also if the clock is set back.
  beats BIGINT NOT NULL,
  -- Time of silence after which the worker is dead if its lock is free.
  dead_after BIGINT NOT NULL,
  -- Shortest lease of its claims, 0: unknown. No reaper reads them before it was silent for that time.
  lease BIGINT NOT NULL,
  -- When a reaper began to doubt that it lives. Null since its last beat.
  doubted_at BIGINT,
  -- 1: its lock shows whether it lives; 0: its session keeps changing, so only its leases do.
  by_lock SMALLINT NOT NULL,
  -- 1: it is stopping; its death is no crash of its messages.
  stopping SMALLINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
