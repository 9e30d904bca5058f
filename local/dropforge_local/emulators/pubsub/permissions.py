"""The permission that each method needs: https://cloud.google.com/pubsub/docs/access-control (2026-11-23)."""

from __future__ import annotations

from ..kit import access

CONSUME = "pubsub.subscriptions.consume"
NEEDS = access.table(
    f"""
    create_topic pubsub.topics.create -
    update_topic pubsub.topics.update topic.name
    publish pubsub.topics.publish topic
    get_topic pubsub.topics.get topic
    list_topics pubsub.topics.list -
    list_topic_subscriptions pubsub.topics.get topic
    list_topic_snapshots pubsub.topics.get topic
    delete_topic pubsub.topics.delete topic
    detach_subscription pubsub.topics.detachSubscription -
    create_subscription pubsub.subscriptions.create -
    create_subscription pubsub.topics.attachSubscription topic
    get_subscription pubsub.subscriptions.get subscription
    update_subscription pubsub.subscriptions.update subscription.name
    list_subscriptions pubsub.subscriptions.list -
    delete_subscription pubsub.subscriptions.delete subscription
    modify_ack_deadline {CONSUME} subscription
    acknowledge {CONSUME} subscription
    pull {CONSUME} subscription
    modify_push_config pubsub.subscriptions.update subscription
    get_snapshot pubsub.snapshots.get snapshot
    list_snapshots pubsub.snapshots.list -
    create_snapshot pubsub.snapshots.create -
    create_snapshot {CONSUME} subscription
    update_snapshot pubsub.snapshots.update snapshot.name
    delete_snapshot pubsub.snapshots.delete snapshot
    seek {CONSUME} subscription
    """
)
