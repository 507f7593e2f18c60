-- Messages that are published at the times of a schedule.
CREATE TABLE IF NOT EXISTS {periodic} (
  name VARCHAR(255) NOT NULL PRIMARY KEY,
  queue VARCHAR(255) NOT NULL,
  -- A cron expression, or 'every' and a number of seconds.
  schedule VARCHAR(255) NOT NULL,
  timezone VARCHAR(255) NOT NULL,
  -- Times that passed while no worker ran: skip, once or all.
  missed VARCHAR(255) NOT NULL,
  priority SMALLINT NOT NULL,
  payload LONGBLOB NOT NULL,
  headers LONGTEXT,
  paused SMALLINT NOT NULL,
  -- The declaration of the program. While it is the same, changes by an operator stay.
  declared LONGTEXT NOT NULL,
  next_at BIGINT NOT NULL,
  last_at BIGINT
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
