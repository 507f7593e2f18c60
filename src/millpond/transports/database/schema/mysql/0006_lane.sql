-- The lane follows the priority and the crashes by itself: UPDATE … SET priority takes effect in claims: it is the
-- priority, and 1000 more for a suspect. Claims take the lowest lane first.
ALTER TABLE {message}
  DROP KEY {prefix}message_claim,
  DROP COLUMN lane,
  ADD COLUMN lane SMALLINT AS (priority + IF(crashes >= 2, 1000, 0)) STORED,
  ADD KEY {prefix}message_claim (queue, ready, lane, due_at, id, state);
