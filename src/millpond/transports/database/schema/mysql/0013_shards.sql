-- One row if this database is a shard of several: its name there, and the shard map, which every shard has.
CREATE TABLE IF NOT EXISTS {shard} (
  id BIGINT NOT NULL PRIMARY KEY CHECK (id = 1),
  name VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  pond VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  version BIGINT NOT NULL,
  map LONGTEXT CHARACTER SET utf8mb4 NOT NULL
) ENGINE = InnoDB;

-- The fence of movers: a write of a mover with a lower epoch is refused. `pending`: the pending change of the map.
CREATE TABLE IF NOT EXISTS {moving} (
  id BIGINT NOT NULL PRIMARY KEY CHECK (id = 1),
  epoch BIGINT NOT NULL,
  pending TEXT CHARACTER SET utf8mb4
) ENGINE = InnoDB;

-- Copies of messages of another shard. No claim sees them until the mover has removed them there.
CREATE TABLE IF NOT EXISTS {incoming} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  source VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  epoch BIGINT NOT NULL,
  created_at BIGINT NOT NULL,
  due_at BIGINT NOT NULL,
  expires_at BIGINT,
  first_attempt_at BIGINT,
  last_attempt_at BIGINT,
  acquired_at BIGINT,
  deliveries INT NOT NULL,
  attempts INT NOT NULL,
  crashes INT NOT NULL,
  priority SMALLINT NOT NULL,
  state VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  queue VARCHAR(255) NOT NULL,
  `key` VARCHAR(255),
  headers MEDIUMTEXT,
  last_error MEDIUMTEXT,
  history MEDIUMTEXT,
  payload LONGBLOB NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Messages that were removed here because another shard has them. Kept for a day.
CREATE TABLE IF NOT EXISTS {moved} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  epoch BIGINT NOT NULL,
  target VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  at BIGINT NOT NULL
) ENGINE = InnoDB;
