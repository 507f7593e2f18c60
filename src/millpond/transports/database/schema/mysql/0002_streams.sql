-- Spark queries that consume queues. The epoch is the fence: the query that opened a stream last has the highest.
CREATE TABLE IF NOT EXISTS {stream} (
  id INT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  name VARCHAR(255) NOT NULL,
  epoch BIGINT NOT NULL,
  acked_seq BIGINT NOT NULL,
  opened_at BIGINT,
  UNIQUE KEY {prefix}stream_name (name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- A stream's claim and its number: the messages of a batch, and how it is cut into slices.
CREATE TABLE IF NOT EXISTS {stream_claim} (
  stream INT NOT NULL,
  seq BIGINT NOT NULL,
  claimed_at BIGINT NOT NULL,
  messages BIGINT NOT NULL,
  slices MEDIUMTEXT CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  PRIMARY KEY (stream, seq)
) ENGINE = InnoDB;

-- The messages of a claim, in the order of slices, each with its outcome if one was recorded. In a table beside the
-- message: workers pay nothing for it.
CREATE TABLE IF NOT EXISTS {stream_message} (
  stream INT NOT NULL,
  seq BIGINT NOT NULL,
  id BINARY(16) NOT NULL,
  outcome VARCHAR(6) CHARACTER SET ascii COLLATE ascii_bin CHECK (outcome IN ('ack', 'nack', 'reject')),
  delay BIGINT,
  reason MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  PRIMARY KEY (stream, seq, id)
) ENGINE = InnoDB;
