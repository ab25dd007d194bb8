// core/kernels/vocabulary_teacher.hpp: what the target's head says about rows, for drafts with a vocabulary of their own; contract in sf/ops.hpp.
#pragma once

#include "sf/ops.hpp"

namespace sf {

VocabularyTeaching vocabulary_teacher(const VocabularyTeacher& teacher);

}  // namespace sf
