-- Running messages that an operator has cancelled. Their workers read this.
CREATE TABLE IF NOT EXISTS {cancel} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  token BIGINT NOT NULL,
  reason LONGTEXT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
