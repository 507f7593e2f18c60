-- Messages that are published at the times of a schedule.
CREATE TABLE {periodic} (
  name TEXT NOT NULL PRIMARY KEY,
  queue TEXT NOT NULL,
  -- A cron expression, or 'every' and a number of seconds.
  schedule TEXT NOT NULL,
  timezone TEXT NOT NULL,
  -- Times that passed while no worker ran: skip, once or all.
  missed TEXT NOT NULL,
  priority INTEGER NOT NULL,
  payload BLOB NOT NULL,
  headers TEXT,
  paused INTEGER NOT NULL,
  -- The declaration of the program. While it is the same, changes by an operator stay.
  declared TEXT NOT NULL,
  next_at INTEGER NOT NULL,
  last_at INTEGER
) WITHOUT ROWID;
