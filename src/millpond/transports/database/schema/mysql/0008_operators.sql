-- A migration cut short is run again. Only MariaDB has IF NOT EXISTS here, and only it reads such comments.
-- `history`: attempts that failed, one line each, oldest first. Null: none failed.
-- `failure`: fingerprint of the error of a FAILED message that was not published again. Null: no open failure. First
-- in its index: acked messages are together at its beginning.
-- `queues` of a worker: as JSON; null: not recorded.
ALTER TABLE {message} ADD COLUMN /*M! IF NOT EXISTS */ history MEDIUMTEXT;

ALTER TABLE {archive} ADD COLUMN /*M! IF NOT EXISTS */ history MEDIUMTEXT,
ADD COLUMN /*M! IF NOT EXISTS */ failure BIGINT,
ADD KEY /*M! IF NOT EXISTS */ {prefix}archive_failure (failure, queue, archived_at);

ALTER TABLE {worker} ADD COLUMN /*M! IF NOT EXISTS */ queues MEDIUMTEXT;

-- Tokens of the server. Only hashes are here.
CREATE TABLE IF NOT EXISTS {token} (
  id VARCHAR(255) NOT NULL PRIMARY KEY,
  name VARCHAR(255) NOT NULL UNIQUE,
  hash VARCHAR(255) NOT NULL,
  roles MEDIUMTEXT NOT NULL,
  queues MEDIUMTEXT NOT NULL,
  created_at BIGINT NOT NULL,
  expires_at BIGINT
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Actions of operators that changed something.
CREATE TABLE IF NOT EXISTS {audit} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  at BIGINT NOT NULL,
  actor VARCHAR(255) NOT NULL,
  action VARCHAR(255) NOT NULL,
  queue VARCHAR(255),
  detail MEDIUMTEXT,
  KEY {prefix}audit_time (at, id)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
