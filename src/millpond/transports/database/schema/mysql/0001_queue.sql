-- Times are microseconds since 1970 in UTC. IF NOT EXISTS: a CREATE commits by itself here, so that a
-- migration cut short is run again. utf8mb4_bin: names differ when their letters differ, in any server's
-- default collation.
CREATE TABLE IF NOT EXISTS {message} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  created_at BIGINT NOT NULL,
  due_at BIGINT NOT NULL,
  expires_at BIGINT,
  first_attempt_at BIGINT,
  last_attempt_at BIGINT,
  acquired_at BIGINT,
  lease_until BIGINT,
  token BIGINT,
  worker BIGINT,
  deliveries INT NOT NULL DEFAULT 0,
  attempts INT NOT NULL DEFAULT 0,
  priority SMALLINT NOT NULL,
  lane SMALLINT NOT NULL,
  state VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin NOT NULL
    CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  -- There are no partial indexes here: this column keeps claimed rows out of the claim's part of its index.
  ready TINYINT AS (IF(state = 'PROCESSING', NULL, 1)) STORED,
  queue VARCHAR(255) NOT NULL,
  `key` VARCHAR(255),
  headers MEDIUMTEXT,
  last_error MEDIUMTEXT,
  payload LONGBLOB NOT NULL,
  -- The state comes last, so that counting by state reads the index only.
  KEY {prefix}message_claim (queue, ready, lane, due_at, id, state),
  KEY {prefix}message_lease (lease_until)
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
  -- In the order of archiving, so that purge deletes neighbours.
  PRIMARY KEY (archived_at, id),
  KEY {prefix}message_archive_queue (queue, state, archived_at, id),
  KEY {prefix}message_archive_id (id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {dedupe} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  publisher BIGINT NOT NULL,
  expires_at BIGINT NOT NULL,
  KEY {prefix}message_dedupe_expiry (expires_at)
) ENGINE = InnoDB;

-- What handlers did once, by message and key of their own.
CREATE TABLE IF NOT EXISTS {once} (
  id BINARY(16) NOT NULL,
  `key` VARCHAR(255) NOT NULL,
  token BIGINT NOT NULL,
  at BIGINT NOT NULL,
  PRIMARY KEY (id, `key`)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {queue} (
  name VARCHAR(255) NOT NULL PRIMARY KEY,
  paused SMALLINT NOT NULL DEFAULT 0,
  keep_completed BIGINT,
  keep_failed BIGINT
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {worker} (
  id BIGINT NOT NULL PRIMARY KEY,
  name VARCHAR(255) NOT NULL,
  started_at BIGINT NOT NULL,
  beat_at BIGINT NOT NULL,
  -- 1: its lock tells whether it lives; 0: its session keeps changing, so only its leases do.
  by_lock SMALLINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
