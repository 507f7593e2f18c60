
CREATE TABLE IF NOT EXISTS `message_migration` (version INTEGER NOT NULL PRIMARY KEY, name VARCHAR(100) NOT NULL, applied_at BIGINT NOT NULL);

CREATE TABLE IF NOT EXISTS `message` (
  id BINARY(16) NOT NULL PRIMARY KEY,
  created_at BIGINT NOT NULL,
  due_at BIGINT NOT NULL,
  expires_at BIGINT,
  first_attempt_at BIGINT,
  last_attempt_at BIGINT,
  acquired_at BIGINT,
  lease BIGINT,
  lease_until BIGINT,
  token BIGINT,
  worker BIGINT,
  deliveries INT NOT NULL DEFAULT 0,
  attempts INT NOT NULL DEFAULT 0,
  crashes INT NOT NULL DEFAULT 0,
  priority SMALLINT NOT NULL,
  lane SMALLINT NOT NULL,
  ahead SMALLINT NOT NULL DEFAULT 0,
  state VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin NOT NULL
    CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  ready TINYINT AS (IF(state = 'PROCESSING', NULL, 1)) STORED,
  queue VARCHAR(255) NOT NULL,
  `key` VARCHAR(255),
  headers MEDIUMTEXT,
  last_error MEDIUMTEXT,
  payload LONGBLOB NOT NULL,
  KEY message_claim (queue, ready, lane, due_at, id, state),
  KEY message_lease (lease_until, worker, token)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `message_archive` (
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
  PRIMARY KEY (archived_at, id),
  KEY message_archive_queue (queue, state, archived_at, id),
  KEY message_archive_id (id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `message_dedupe` (
  id BINARY(16) NOT NULL PRIMARY KEY,
  publisher BIGINT NOT NULL,
  expires_at BIGINT NOT NULL,
  KEY message_dedupe_expiry (expires_at)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS `message_once` (
  id BINARY(16) NOT NULL,
  `key` VARCHAR(255) NOT NULL,
  token BIGINT NOT NULL,
  at BIGINT NOT NULL,
  PRIMARY KEY (id, `key`)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `message_queue` (
  name VARCHAR(255) NOT NULL PRIMARY KEY,
  paused SMALLINT NOT NULL DEFAULT 0,
  keep_completed BIGINT,
  keep_failed BIGINT
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `message_worker` (
  id BIGINT NOT NULL PRIMARY KEY,
  name VARCHAR(255) NOT NULL,
  started_at BIGINT NOT NULL,
  beat_at BIGINT NOT NULL,
  beats BIGINT NOT NULL,
  dead_after BIGINT NOT NULL,
  lease BIGINT NOT NULL,
  doubted_at BIGINT,
  by_lock SMALLINT NOT NULL,
  stopping SMALLINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO `message_migration` (version, name, applied_at) VALUES (1, 'queue', coalesce(NULL, timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))));

CREATE TABLE IF NOT EXISTS `message_stream` (
  id INT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  name VARCHAR(255) NOT NULL,
  epoch BIGINT NOT NULL,
  acked_seq BIGINT NOT NULL,
  opened_at BIGINT,
  UNIQUE KEY message_stream_name (name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `message_stream_claim` (
  stream INT NOT NULL,
  seq BIGINT NOT NULL,
  claimed_at BIGINT NOT NULL,
  messages BIGINT NOT NULL,
  slices MEDIUMTEXT CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  PRIMARY KEY (stream, seq)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS `message_stream_message` (
  stream INT NOT NULL,
  seq BIGINT NOT NULL,
  id BINARY(16) NOT NULL,
  outcome VARCHAR(6) CHARACTER SET ascii COLLATE ascii_bin CHECK (outcome IN ('ack', 'nack', 'reject')),
  delay BIGINT,
  reason MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  PRIMARY KEY (stream, seq, id)
) ENGINE = InnoDB;

INSERT INTO `message_migration` (version, name, applied_at) VALUES (2, 'streams', coalesce(NULL, timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))));

CREATE TABLE IF NOT EXISTS `message_lot` (
  lot BIGINT NOT NULL PRIMARY KEY,
  batch BIGINT NOT NULL,
  at BIGINT NOT NULL,
  writer VARCHAR(255) NOT NULL,
  KEY message_lot_writer (writer, batch)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `message_staging` (
  lot BIGINT NOT NULL,
  id BINARY(16) NOT NULL,
  due_at BIGINT,
  priority SMALLINT NOT NULL,
  queue VARCHAR(255) NOT NULL,
  `key` VARCHAR(255),
  headers MEDIUMTEXT,
  payload LONGBLOB NOT NULL,
  PRIMARY KEY (lot, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `message_written` (
  writer VARCHAR(255) NOT NULL,
  part INT NOT NULL,
  batch BIGINT NOT NULL,
  size BIGINT NOT NULL,
  at BIGINT NOT NULL,
  PRIMARY KEY (writer, part)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO `message_migration` (version, name, applied_at) VALUES (3, 'staging', coalesce(NULL, timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))));

CREATE TABLE IF NOT EXISTS `message_export` (
  lake VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
  shard INT NOT NULL,
  until BIGINT,
  at BIGINT NOT NULL,
  path TEXT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO `message_migration` (version, name, applied_at) VALUES (4, 'exports', coalesce(NULL, timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))));

CREATE TABLE IF NOT EXISTS `message_export_range` (
  lake VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  since BIGINT NOT NULL,
  until BIGINT NOT NULL,
  messages BIGINT NOT NULL,
  purged BIGINT NOT NULL,
  PRIMARY KEY (lake, since)
) ENGINE = InnoDB;

INSERT INTO `message_migration` (version, name, applied_at) VALUES (5, 'export_ranges', coalesce(NULL, timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))));
