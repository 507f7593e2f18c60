-- Settings with the queue; null: the default. Times are microseconds. 0 of `max_crashes`, `max_deliveries` and
-- `retry_attempts` is no limit. The retry policy is null unless one of its columns is set. Values that no worker could
-- use are refused here: the longest time is 100 years.
ALTER TABLE {queue}
  ADD COLUMN lease bigint CHECK (lease BETWEEN 1 AND 3153600000000000),
  ADD COLUMN max_crashes integer CHECK (max_crashes BETWEEN 0 AND 1000000),
  ADD COLUMN max_deliveries integer CHECK (max_deliveries BETWEEN 0 AND 1000000),
  ADD COLUMN retry_initial bigint CHECK (retry_initial BETWEEN 0 AND 3153600000000000),
  ADD COLUMN retry_multiplier double precision CHECK (retry_multiplier BETWEEN 1 AND 1e300),
  ADD COLUMN retry_step bigint CHECK (retry_step BETWEEN 0 AND 3153600000000000),
  ADD COLUMN retry_maximum bigint CHECK (retry_maximum BETWEEN 0 AND 3153600000000000),
  ADD COLUMN retry_jitter double precision CHECK (retry_jitter BETWEEN 0 AND 1),
  ADD COLUMN retry_attempts integer CHECK (retry_attempts >= 0),
  ADD COLUMN retry_total bigint CHECK (retry_total BETWEEN 0 AND 3153600000000000),
  ADD COLUMN retry_first text CHECK (retry_first IN ('immediate', 'backoff'));
