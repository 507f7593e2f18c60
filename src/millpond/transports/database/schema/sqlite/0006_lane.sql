-- The lane follows the priority and the crashes by itself: UPDATE … SET priority takes effect in claims: it is the
-- priority, and 1000 more for a suspect. Claims take the lowest lane first.
DROP INDEX {prefix}message_claim;

ALTER TABLE {message} DROP COLUMN lane;

ALTER TABLE {message} ADD COLUMN lane INTEGER AS (priority + CASE WHEN crashes >= 2 THEN 1000 ELSE 0 END) VIRTUAL;

CREATE INDEX {prefix}message_claim ON {message} (queue, lane, due_at, id, state) WHERE state <> 'PROCESSING';
