-- Settings with the queue; null: the default. Times are microseconds. 0 of `max_crashes`, `max_deliveries` and
-- `retry_attempts` is no limit. The retry policy is null unless one of its columns is set. Values that no worker could
-- use are refused here: the longest time is 100 years. A text is greater than any number.
ALTER TABLE {queue} ADD COLUMN lease INTEGER
  CHECK (typeof(lease) <> 'real' AND lease BETWEEN 1 AND 3153600000000000);

ALTER TABLE {queue} ADD COLUMN max_crashes INTEGER
  CHECK (typeof(max_crashes) <> 'real' AND max_crashes BETWEEN 0 AND 1000000);

ALTER TABLE {queue} ADD COLUMN max_deliveries INTEGER
  CHECK (typeof(max_deliveries) <> 'real' AND max_deliveries BETWEEN 0 AND 1000000);

ALTER TABLE {queue} ADD COLUMN retry_initial INTEGER
  CHECK (typeof(retry_initial) <> 'real' AND retry_initial BETWEEN 0 AND 3153600000000000);

ALTER TABLE {queue} ADD COLUMN retry_multiplier REAL CHECK (retry_multiplier BETWEEN 1 AND 1e300);

ALTER TABLE {queue} ADD COLUMN retry_step INTEGER
  CHECK (typeof(retry_step) <> 'real' AND retry_step BETWEEN 0 AND 3153600000000000);

ALTER TABLE {queue} ADD COLUMN retry_maximum INTEGER
  CHECK (typeof(retry_maximum) <> 'real' AND retry_maximum BETWEEN 0 AND 3153600000000000);

ALTER TABLE {queue} ADD COLUMN retry_jitter REAL CHECK (retry_jitter BETWEEN 0 AND 1);

ALTER TABLE {queue} ADD COLUMN retry_attempts INTEGER
  CHECK (typeof(retry_attempts) <> 'real' AND retry_attempts BETWEEN 0 AND 2147483647);

ALTER TABLE {queue} ADD COLUMN retry_total INTEGER
  CHECK (typeof(retry_total) <> 'real' AND retry_total BETWEEN 0 AND 3153600000000000);

ALTER TABLE {queue} ADD COLUMN retry_first TEXT CHECK (retry_first IN ('immediate', 'backoff'));
