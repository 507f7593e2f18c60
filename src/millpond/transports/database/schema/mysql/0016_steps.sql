-- Work of handlers outside of transactions: the delivery that owns a step, and its result once it is done.
CREATE TABLE IF NOT EXISTS {step} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  scope VARCHAR(255) NOT NULL,
  name VARCHAR(255) NOT NULL,
  message BINARY(16) NOT NULL,
  token BIGINT NOT NULL,
  result LONGBLOB,
  at BIGINT NOT NULL,
  KEY {prefix}step_at (at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
