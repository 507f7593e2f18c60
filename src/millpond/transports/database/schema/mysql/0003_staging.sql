-- Rows that the tasks of a bulk write load before its commit. No claim reads them.
CREATE TABLE IF NOT EXISTS {lot} (
  lot BIGINT NOT NULL PRIMARY KEY,
  batch BIGINT NOT NULL,
  at BIGINT NOT NULL,
  writer VARCHAR(255) NOT NULL,
  KEY {prefix}lot_writer (writer, batch)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {staging} (
  lot BIGINT NOT NULL,
  id BINARY(16) NOT NULL,
  -- Null: when the write is committed.
  due_at BIGINT,
  priority SMALLINT NOT NULL,
  queue VARCHAR(255) NOT NULL,
  `key` VARCHAR(255),
  headers MEDIUMTEXT,
  payload LONGBLOB NOT NULL,
  PRIMARY KEY (lot, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The last batch that each writer has published: the whole of it (part -1), and each part where parts go alone.
CREATE TABLE IF NOT EXISTS {written} (
  writer VARCHAR(255) NOT NULL,
  part INT NOT NULL,
  batch BIGINT NOT NULL,
  size BIGINT NOT NULL,
  at BIGINT NOT NULL,
  PRIMARY KEY (writer, part)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
