-- Messages that are published at the times of a schedule.
CREATE TABLE {periodic} (
  name text COLLATE "C" NOT NULL PRIMARY KEY,
  queue text NOT NULL,
  -- A cron expression, or 'every' and a number of seconds.
  schedule text NOT NULL,
  timezone text NOT NULL,
  -- Times that passed while no worker ran: skip, once or all.
  missed text NOT NULL,
  priority smallint NOT NULL,
  payload bytea NOT NULL,
  headers text,
  paused smallint NOT NULL,
  -- The declaration of the program. While it is the same, changes by an operator stay.
  declared text NOT NULL,
  next_at bigint NOT NULL,
  last_at bigint
);
