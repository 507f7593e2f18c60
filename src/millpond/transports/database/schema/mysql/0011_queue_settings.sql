-- Settings with the queue; null: the default. Times are microseconds. 0 of `max_crashes`, `max_deliveries` and
-- `retry_attempts` is no limit. The retry policy is null unless one of its columns is set. Values that no worker could
-- use are refused here: the longest time is 100 years.
ALTER TABLE {queue}
  ADD COLUMN /*M! IF NOT EXISTS */ lease BIGINT CHECK (lease BETWEEN 1 AND 3153600000000000),
  ADD COLUMN /*M! IF NOT EXISTS */ max_crashes INT CHECK (max_crashes BETWEEN 0 AND 1000000),
  ADD COLUMN /*M! IF NOT EXISTS */ max_deliveries INT CHECK (max_deliveries BETWEEN 0 AND 1000000),
  ADD COLUMN /*M! IF NOT EXISTS */ retry_initial BIGINT CHECK (retry_initial BETWEEN 0 AND 3153600000000000),
  ADD COLUMN /*M! IF NOT EXISTS */ retry_multiplier DOUBLE CHECK (retry_multiplier BETWEEN 1 AND 1e300),
  ADD COLUMN /*M! IF NOT EXISTS */ retry_step BIGINT CHECK (retry_step BETWEEN 0 AND 3153600000000000),
  ADD COLUMN /*M! IF NOT EXISTS */ retry_maximum BIGINT CHECK (retry_maximum BETWEEN 0 AND 3153600000000000),
  ADD COLUMN /*M! IF NOT EXISTS */ retry_jitter DOUBLE CHECK (retry_jitter BETWEEN 0 AND 1),
  ADD COLUMN /*M! IF NOT EXISTS */ retry_attempts INT CHECK (retry_attempts >= 0),
  ADD COLUMN /*M! IF NOT EXISTS */ retry_total BIGINT CHECK (retry_total BETWEEN 0 AND 3153600000000000),
  ADD COLUMN /*M! IF NOT EXISTS */ retry_first VARCHAR(9) CHECK (retry_first IN ('immediate', 'backoff'));
