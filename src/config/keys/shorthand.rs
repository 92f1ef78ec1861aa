//! Short names for use in the tables.

pub(super) use super::key::ConfigValueKind::{
    Any, AutoOr, Betas, Bool, OneOf, OneOfAnyCase, Section as Object, Str, Strings, StringsOrOne,
};
pub(super) use super::key::KeyStatus::{Honoured as H, InRefusedSection as R, Inherited as S};
pub(super) use super::key::{ConfigSection, ConfigValueKind, KeyStatus, keys};
pub(super) const INT: ConfigValueKind = ConfigValueKind::Int(i64::MIN, i64::MAX);
pub(super) const COUNT: ConfigValueKind = ConfigValueKind::Int(0, i64::MAX);
pub(super) const POSITIVE: ConfigValueKind = ConfigValueKind::Int(1, i64::MAX);
pub(super) const FLOAT: ConfigValueKind = ConfigValueKind::Float(f64::MIN, f64::MAX);
pub(super) const NOT_NEGATIVE: ConfigValueKind = ConfigValueKind::Float(0.0, f64::MAX);
pub(super) const RATE_PER_GROUP: ConfigValueKind = ConfigValueKind::PerGroup(0.0, f64::MAX);
pub(super) const SHARE: ConfigValueKind = ConfigValueKind::Float(0.0, 1.0);
pub(super) const DTYPE: ConfigValueKind = OneOfAnyCase(&["fp32", "fp16", "bf16"]);

pub(super) const fn none(why: &'static str) -> KeyStatus {
    KeyStatus::NoEffect(why)
}
pub(super) const fn implies_every_unit(why: &'static str) -> KeyStatus {
    KeyStatus::ImpliesEveryUnit(why)
}
pub(super) const fn refuse(why: &'static str) -> KeyStatus {
    KeyStatus::Refused(why)
}
pub(super) const fn refused_above_one(why: &'static str) -> KeyStatus {
    KeyStatus::RefusedAbove1(why)
}
pub(super) const fn removed(why: &'static str) -> KeyStatus {
    KeyStatus::Removed(why)
}
pub(super) const fn removed_unless_off(why: &'static str) -> KeyStatus {
    KeyStatus::RemovedUnlessOff(why)
}
pub(super) const fn moved(to: &'static str) -> KeyStatus {
    KeyStatus::Moved(to)
}
